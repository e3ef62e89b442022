"""The sequential engine: what it leaves alone, and what makes no difference to it."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import tiny
from fednorm.core.state import digest
from fednorm.engines.sequential import SequentialEngine
from fednorm.halves import training


class Shrinking(nn.Linear):
    """A layer that changes its weight in place whenever it is used, as an embedding with a largest norm does."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(input)


def test_a_layer_that_changes_its_weight_in_place_leaves_the_server_alone() -> None:
    made = tiny.plan(model=nn.Sequential(nn.Flatten(), Shrinking(36, tiny.NUM_CLASSES)).double())
    phase = made.phases[0]
    server = made.initial()
    before = digest(server)
    numbers = made.numbers(phase.id, 1)
    jobs = [made.job(phase, client, phase.start(server, {}, made.device), 0, numbers) for client in (0, 1)]
    assert all(job.num_steps == 2 and job.start[key] is server[key] for job in jobs for key in phase.sent)
    outcomes = list(SequentialEngine(made).train(phase, jobs))
    assert digest(server) == before
    assert all(digest(outcome.update.shared) != before for outcome in outcomes)


@pytest.mark.parametrize(("limit", "value"), [("BUNCH_STEPS", 1), ("BUNCH_STEPS", 5), ("BUNCH_BYTES", 1)])
def test_how_many_clients_are_made_ready_together_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    model = nn.Sequential(tiny.conv_net(), nn.Dropout(0.5))
    at_once = tiny.fingerprint(tiny.play(tiny.plan("fedbn", model=model)))
    monkeypatch.setattr(training, limit, value)
    assert tiny.fingerprint(tiny.play(tiny.plan("fedbn", model=model))) == at_once


class Foreign(nn.Module):
    """A layer of another library, which may draw from torch's own generator: it tells how that was seeded."""

    seeds: ClassVar[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seeds.append(torch.default_generator.initial_seed())
        return x


def test_torchs_own_generator_is_seeded_by_run_client_and_place() -> None:
    def seeds(seed: int) -> list[int]:
        made = tiny.plan(model=nn.Sequential(nn.Flatten(), Foreign(), nn.Linear(36, 3)).double(), seed=seed)
        phase = made.phases[0]
        jobs = [
            made.job(phase, client, phase.start(made.initial(), {}, made.device), first, made.numbers(phase.id, 1))
            for client in (0, 1)
            for first in (0, 2)
        ]
        engine = SequentialEngine(made)
        Foreign.seeds.clear()
        list(engine.train(phase, jobs))
        return Foreign.seeds[-8::2]  # two steps each, under one seed; what came before was a try

    before = torch.default_generator.initial_seed()
    found = seeds(0) + seeds(1)
    assert len(set(found)) == 8
    assert seeds(0) == found[:4]
    assert torch.default_generator.initial_seed() == before
