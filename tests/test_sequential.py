"""The sequential engine: what it leaves alone, and what makes no difference to it."""

from __future__ import annotations

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
    jobs = [made.job(phase, client, phase.start(server, {}, made.device), 0) for client in (0, 1)]
    assert all(job.num_steps == 2 and job.start[key] is server[key] for job in jobs for key in phase.sent)
    outcomes = list(SequentialEngine(made).train(phase, made.numbers(phase.id, 1), jobs))
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
