"""CPU threads of a run, given back afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fednorm.plan import Plan


@contextmanager
def threads_of(plan: Plan) -> Iterator[None]:
    """As many threads as the config says; one under `auto`, where the choice of engine must not change a bit."""
    config, before = plan.config.engine, torch.get_num_threads()
    automatic = 1 if config.name == "auto" and plan.device.type == "cpu" else before
    torch.set_num_threads(config.threads or automatic)
    try:
        yield
    finally:
        torch.set_num_threads(before)
