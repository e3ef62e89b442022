"""What really played a run, for result.json: an engine may have fallen back, a run may have gone on elsewhere."""

from __future__ import annotations

from typing import cast

import torch

from fednorm.engines.base import Engine
from fednorm.engines.machine import device_name, world_size
from fednorm.running.plan import Plan
from fednorm.running.records import Ran


def how_it_ran(plan: Plan, name: str, engine: Engine, earlier: Ran | None) -> Ran:
    """What plays a run now with the engine of this name, after what played it `earlier`."""
    in_workers = name == "workers" and not engine.fell_back
    now: Ran = {
        "engine": "sequential" if engine.fell_back else name,
        "fell_back": f"{name}: {engine.fell_back}" if engine.fell_back else None,
        "precision": plan.config.engine.precision,
        "threads": 1 if in_workers else torch.get_num_threads(),
        "processes": world_size() * (engine.processes if in_workers else 1),
        "device": str(plan.device),
        "device_name": device_name(plan.device),
    }
    if earlier is None:
        return now
    last = cast(Ran, {key: value for key, value in earlier.items() if key != "before"})
    before = [*earlier.get("before", []), *([last] if last != now else [])]
    return {**now, "before": before} if before else now
