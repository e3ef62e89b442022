"""Operators that torch cannot map over clients: they are played client by client, equal to the reference, and named."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import tiny
from fednorm.engines.stack.slot import StackSlot
from test_stacked import assert_same_clients, gap

LINE = "stacked engine: torch plays aten::renorm client by client, which is slow\n"
CHANGES = {"data": tiny.federation((4, 4)), "rounds": 2, "train__local_steps": 2, "train__batch_size": 2}


class Renormed(nn.Module):
    """Features whose norms are bounded by an operator that has no rule."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8))
        self.head = nn.Linear(8, tiny.NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.renorm(self.features(x), 2, 0, 1.5))


@pytest.mark.parametrize("stays", [False, True], ids=["step by step", "in programs"])
def test_an_operator_without_a_rule_is_named_once(
    stays: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if stays:
        monkeypatch.setattr("fednorm.engines.stack.slot.DEVICES", {"cpu"})
    model = Renormed().double()
    reference = tiny.play(tiny.plan("fedavg", model=copy.deepcopy(model), engine__name="sequential", **CHANGES))
    capsys.readouterr()
    run = tiny.play(tiny.plan("fedavg", model=model, engine__name="stacked", **CHANGES))
    told = [line for line in capsys.readouterr().err.splitlines(keepends=True) if "made ready" not in line]
    assert told == [LINE]
    held = run.server.held
    assert (isinstance(held, StackSlot) and not held.stack.refused) is stays
    assert gap(reference, run) < 1e-9
    assert_same_clients(reference, run)


class Warns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(36, tiny.NUM_CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        warnings.warn("the model's own", UserWarning, stacklevel=2)
        return self.head(x)


def test_other_warnings_are_shown_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(UserWarning, match="the model's own"):
        tiny.play(tiny.plan("fedavg", model=Warns().double(), engine__name="stacked", **CHANGES))
    assert "client by client" not in capsys.readouterr().err
