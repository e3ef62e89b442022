"""CPU threads of a run, given back afterwards."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from fednorm.engines.machine import threads
from fednorm.running.plan import Plan


def threads_of(plan: Plan) -> AbstractContextManager[None]:
    """As many threads as the config says; one under `auto`, where the choice of engine must not change a bit."""
    config = plan.config.engine
    automatic = 1 if config.name == "auto" and plan.device.type == "cpu" else torch.get_num_threads()
    return threads(config.threads or automatic)
