"""CPU threads of a run, given back afterwards."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from fednorm.engines.machine import threads
from fednorm.running.plan import Plan


def threads_of(plan: Plan) -> AbstractContextManager[None]:
    """As many threads as the config says; else one under `auto`, where the choice of engine must not change a bit.

    Beside a GPU it is one too: there the host only says what is to be done. Its draws are so short that more threads
    wait for each other instead, and several runs on one machine then stand in each other's way (measured with four runs
    on 16 cores: a third of the speed).
    """
    config = plan.config.engine
    automatic = torch.get_num_threads() if config.name != "auto" and plan.device.type == "cpu" else 1
    return threads(config.threads or automatic)
