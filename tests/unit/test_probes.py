"""Probes: what they say about a step worked by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tiny
from fednorm.core.state import Tree
from fednorm.core.step import Carry
from fednorm.errors import ConfigError
from fednorm.halves.prepared import facts_of
from fednorm.scoring.probes import PROBES, find_probes

TREE = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
ZERO = {key: torch.zeros_like(value) for key, value in TREE.items()}


def see(name: str, grads: Tree = ZERO, new: Tree = ZERO, anchor: Tree = ZERO, state: Tree | None = None) -> float:
    """What a probe sees of a step with these gradients, which led from zeros to these parameters and this state."""
    net = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    before = Carry(params=ZERO, state={}, optimizer={}, extras={}, anchor=anchor)
    after = before._replace(params=new, state=state or {})
    return float(PROBES[name].see(grads, before, after, facts_of(net)))


def test_norms_run_over_all_tensors() -> None:
    assert see("grad-norm", grads=TREE) == 5.0
    assert see("drift", new=TREE) == 5.0
    assert see("drift", new=TREE, anchor=TREE) == 0.0


def test_statistics_are_averaged_over_channels() -> None:
    state = {"0.running_mean": torch.tensor([1.0, 3.0]), "1.running_mean": torch.tensor([5.0, 7.0])}
    state |= {"0.running_var": torch.tensor([2.0, 2.0]), "1.running_var": torch.tensor([4.0, 4.0])}
    assert see("running-mean", state=state) == 4.0
    assert see("running-var", state=state) == 3.0
    assert see("running-var") == 0.0


def test_a_run_records_them_every_so_many_rounds() -> None:
    run = tiny.play(tiny.plan("fedavg", rounds=4, eval__probes=["drift"], eval__probe_every=2))
    rows = list(run.store.rows())
    assert ["probes" in row for row in rows] == [False, True, False, True]
    assert set(rows[1]["probes"]["train"]) == {"0", "1", "2"}
    assert all(seen["drift"] > 0 for seen in rows[1]["probes"]["train"].values())


def test_an_unknown_probe_is_refused() -> None:
    with pytest.raises(ConfigError) as refusal:
        find_probes(("grad-nrom",))
    assert str(refusal.value) == "probe 'grad-nrom' is not known; did you mean 'grad-norm'?"
