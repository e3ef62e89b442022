"""How many CPU threads a run takes where nobody says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fednorm.running.config import RunConfig, updated
from fednorm.running.plan import make_plan
from fednorm.running.threads import threads_of


@pytest.mark.parametrize(
    ("engine", "device", "given", "expected"),
    [
        ("sequential", "cpu", 0, 3),
        ("auto", "cpu", 0, 1),
        ("stacked", "cuda", 0, 1),
        ("auto", "cuda", 0, 1),
        ("sequential", "cpu", 2, 2),
        ("stacked", "cuda", 2, 2),
    ],
)
def test_threads_of_a_run(engine: str, device: str, given: int, expected: int) -> None:
    config = updated(RunConfig(), {"engine.name": engine, "engine.threads": given})
    plan = replace(make_plan(config), device=torch.device(device))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with threads_of(plan):
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
