"""A learning rate of its own for the head: which entries it is, how far they move, equal in every engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import over_a_wire
import tiny
from fednorm.core.roles import head
from fednorm.core.state import entries
from fednorm.errors import ConfigError
from fednorm.models import build
from fednorm.running.same_program import same_program
from fednorm.running.store import Store
from test_stacked import gap

TWO_RATES = {"train__lr": 0.02, "train__head_lr": 0.1}


def test_the_head_is_the_last_layer_or_all_outside_a_declared_backbone() -> None:
    assert head(tiny.residual_net()) == {"fc.weight", "fc.bias"}
    with torch.device("meta"):
        deeplab = build("deeplabv3plus", backbone="resnet18")
    listed = [entry for entry in entries(deeplab) if entry.trainable]
    outside = head(deeplab)
    parts = {part: {e.key for e in listed if e.key.startswith(part)} for part in ("aspp", "project", "classifier")}
    assert outside == set().union(*parts.values())
    assert all(parts.values())
    inside = {entry.key for entry in listed} - outside
    assert len(inside) == len(list(deeplab.backbone.parameters()))


def test_a_wrapped_model_declares_its_backbone_too() -> None:
    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
            self.top = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))

    assert head(nn.Sequential(Features())) == {f"0.top.{layer}.{part}" for layer in "01" for part in ("weight", "bias")}


def test_the_head_moves_as_many_times_further() -> None:
    plain = {"rounds": 1, "train__local_steps": 1, "train__momentum": 0.0, "train__lr": 0.02}
    one, two = (tiny.play(tiny.plan("fedavg", **plain, **more)) for more in ({}, {"train__head_lr": 0.1}))
    start = one.plan.prepared.initial
    for key, before in start.items():
        moved, further = (run.server.tree[key].double() - before.double() for run in (one, two))
        torch.testing.assert_close(further, moved * (5 if key in head(one.plan.prepared.model) else 1))
    assert next(iter(two.store.rows()))["lr"] == 0.02


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_stacks_and_programs_train_at_both_rates(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choices = {"train__optimizer": optimizer, "data": tiny.federation((8, 8, 8)), "rounds": 2, **TWO_RATES}
    reference = tiny.play(tiny.plan("fixup+fedprox" if optimizer == "sgd" else "fedavg", **choices))
    method = reference.plan.config.method
    assert gap(reference, tiny.play(tiny.plan(method, engine__name="stacked", **choices))) < 1e-10
    monkeypatch.setattr("fednorm.engines.stack.slot.DEVICES", {"cpu"})
    assert gap(reference, tiny.play(tiny.plan(method, engine__name="stacked", **choices))) < 1e-10


def test_a_run_at_two_rates_goes_on_exactly_and_is_the_same_in_processes() -> None:
    choices = {**TWO_RATES, "train__schedule": "cosine"}
    whole = tiny.fingerprint(tiny.play(tiny.plan("fedbn", **choices)))
    store = Store()
    tiny.play(tiny.plan("fedbn", **choices), store, rounds=2)
    assert tiny.fingerprint(tiny.play(tiny.plan("fedbn", **choices), store)) == whole
    assert tiny.fingerprint(tiny.play(tiny.plan("fedbn", **choices, **tiny.engine("workers")))) == whole


def test_runs_share_a_program_only_where_the_rates_are_in_one_proportion() -> None:
    first = tiny.plan("fedavg", **TWO_RATES)
    assert same_program(first, tiny.plan("fedavg", **TWO_RATES, seed=3))
    assert not same_program(first, tiny.plan("fedavg", train__lr=0.05, train__head_lr=0.1))


def test_two_rates_cross_a_wire(tmp_path: Path) -> None:
    plan = tiny.plan("fedavg", **TWO_RATES)
    played = over_a_wire.play(plan, tiny.residual_net(), tmp_path)
    assert played.fingerprint == over_a_wire.fingerprint_of(tiny.play(plan))


def test_what_has_no_two_rates_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        tiny.plan("fedavg", train__lr=0.0, train__head_lr=0.1)
    assert str(caught.value) == (
        "train.head_lr=0.1 is kept as a multiple of train.lr, which is 0; give train.lr above 0"
    )
    with pytest.raises(ConfigError) as caught:
        tiny.config(train__head_lr=-1.0)
    assert str(caught.value) == "train.head_lr=-1.0 is out of range; give 0 or more"
    with pytest.raises(ConfigError) as caught:
        tiny.plan("fedavg", model=nn.Sequential(nn.BatchNorm2d(1), nn.Flatten()).double(), train__head_lr=0.1)
    assert str(caught.value) == (
        "train.head_lr=0.1 finds no head in the given Sequential: it has no linear layer, no convolution and no "
        "backbone; leave it out"
    )
