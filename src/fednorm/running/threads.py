"""CPU threads of a run, given back afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from fednorm.running.plan import Plan


def threads_of(plan: Plan) -> AbstractContextManager[None]:
    """As many threads as the config says; one under `auto`, where the choice of engine must not change a bit."""
    config = plan.config.engine
    automatic = 1 if config.name == "auto" and plan.device.type == "cpu" else torch.get_num_threads()
    return threads(config.threads or automatic)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads for torch, given back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
