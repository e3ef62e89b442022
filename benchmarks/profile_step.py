"""Where the time of a step goes on a GPU: by kernel, how many launches and how long, beside what the step takes.

    python benchmarks/profile_step.py --models resnet20:5/15,resnet18:5 --out profile.json

Cases are written as `fednorm bench models` takes them. A kernel that serves layers of several sizes shows its shortest
and its longest launch.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections import defaultdict
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fednorm.bench.cases import TABLE, Case, read_cases
from fednorm.bench.machine import describe_machine
from fednorm.bench.models import stacked
from fednorm.bench.options import Options
from fednorm.bench.timing import Effort
from fednorm.errors import FednormError, first_line

MOST = 25
"""Kernels that are printed."""


def profiled(case: Case, clients: int, options: Options) -> dict[str, Any]:
    """Milliseconds of a step by the clock, and by kernel, of a case's clients in a stack."""
    steps = stacked(case, clients, options.precision or "bf16", options)
    steps(0.0)
    seconds = steps(0.3)
    assert steps.rounds is not None
    found: dict[str, list[float]] = defaultdict(list)
    busy: list[tuple[float, float]] = []

    def look(play: Callable[[], object]) -> int:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            play()
        for event in seen.events() or []:
            if event.device_type.name == "CUDA":
                found[event.name].append(event.time_range.elapsed_us())
                busy.append((event.time_range.start, event.time_range.end))
        return len(busy)

    launches = steps.rounds.count(look) / options.local_steps
    per = launches / max(len(busy), 1)
    steps.rounds.close()
    kernels = [
        {"kernel": name, "launches": len(us) * per, "us": sum(us) * per, "shortest": min(us), "longest": max(us)}
        for name, us in found.items()
    ]
    kernels.sort(key=itemgetter("us"), reverse=True)
    return {
        "model": case.name,
        "clients": clients,
        "ms_a_step": 1e3 * seconds,
        "busy_ms": sum(end - start for start, end in _joined(busy)) * per / 1e3,
        "launches": launches,
        "kernels": kernels,
    }


def _joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans of time as ones that do not overlap."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def show(found: dict[str, Any]) -> None:
    head = f"{found['model']}, {found['clients']} clients: {found['ms_a_step']:.3f} ms a step"
    print(f"{head}, kernels {found['busy_ms']:.3f}, {found['launches']:.0f} launches")
    for each in found["kernels"][:MOST]:
        spread = f"{each['shortest']:6.1f} to {each['longest']:6.1f} us"
        print(f"  {each['us']:8.1f} us  {each['launches']:6.1f} x  {spread}  {each['kernel'][:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=TABLE, help="as fednorm bench models takes them")
    parser.add_argument("--local-steps", type=int, default=10)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, metavar="FILE")
    asked = parser.parse_args()
    cases = read_cases(asked.models, (5,))
    options = Options(
        sections=("models",), device=torch.device(asked.device), effort=Effort(), cases=cases,
        local_steps=asked.local_steps, precision=asked.precision,
    )  # fmt: skip
    results: list[dict[str, Any]] = []
    for case in cases:
        for clients in case.clients:
            try:
                results.append(profiled(case, clients, options))
            except (RuntimeError, FednormError) as error:
                print(f"{case.name}, {clients} clients left out: {first_line(error)}", flush=True)
                continue
            show(results[-1])
            if asked.out:
                asked.out.write_text(
                    json.dumps({"machine": describe_machine(options.device), "steps": results}, indent=1) + "\n"
                )
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
