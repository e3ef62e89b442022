"""The config: round trips, and one line for every value that cannot work."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fednorm.errors import ConfigError
from fednorm.running.config import RunConfig, all_fields, from_dict, to_dict, updated

CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "method": st.text(max_size=10),
        "rounds": st.integers(1, 10**6),
        "clients_per_round": st.one_of(st.none(), st.integers(1, 99)),
        "seed": st.integers(0, 2**40),
        "init": st.one_of(st.none(), st.text(max_size=5)),
        "allow_noop": st.booleans(),
        "data.clients": st.integers(1, 50),
        "data.val_fraction": st.floats(0, 0.99),
        "train.local_steps": st.one_of(st.none(), st.integers(1, 50)),
        "train.lr": st.floats(0, 1e6),
        "train.weights": st.sampled_from(["size", "uniform"]),
        "eval.probes": st.lists(st.text(min_size=1, max_size=5), max_size=3),
        "engine.quorum": st.one_of(st.none(), st.floats(0.01, 1)),
    },
)


@given(CHANGES)
def test_a_config_survives_json(changes: dict[str, Any]) -> None:
    config = updated(RunConfig(), changes)
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


@given(CHANGES)
def test_an_update_sets_what_it_names_and_nothing_else(changes: dict[str, Any]) -> None:
    before, after = to_dict(RunConfig()), to_dict(updated(RunConfig(), changes))
    for path in all_fields():
        value: Any = after
        default: Any = before
        for name in path.split("."):
            value, default = value[name], default[name]
        assert value == changes.get(path, default)


def test_no_values_are_the_defaults() -> None:
    assert from_dict({}) == RunConfig()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 0}, "rounds=0 is out of range; give 1 or more"),
        ({"train.lr": -0.1}, "train.lr=-0.1 is out of range; give 0 or more"),
        ({"train.lr": float("nan")}, "train.lr=nan is out of range; give 0 or more"),
        ({"train.lr": "fast"}, "train.lr='fast' does not fit; give float"),
        ({"train.batch_size": 2.5}, "train.batch_size=2.5 does not fit; give int"),
        ({"train.batch_size": True}, "train.batch_size=True does not fit; give int"),
        ({"train.weights": "lion"}, "train.weights='lion' does not fit; give 'size' or 'uniform'"),
        ({"clients_per_round": "all"}, "clients_per_round='all' does not fit; give int"),
        ({"data.val_fraction": 1.0}, "data.val_fraction=1.0 is out of range; give 0 up to below 1"),
        ({"engine.quorum": 0.0}, "engine.quorum=0.0 is out of range; give a share above 0, up to 1"),
        ({"data.unseen": 5}, "data.unseen=5 leaves no client of 5 to train; give less"),
        (
            {"train.local_steps": 2, "train.local_epochs": 3},
            "local_steps=2 and local_epochs=3 exclude each other; give one",
        ),
        ({"train.lrr": 1.0}, "config field 'train.lrr' is not known; did you mean 'train.lr'?"),
        ({"train": 1}, "config field 'train' is not known"),
        ({"rounds.x": 1}, "config field 'rounds.x' is not known; did you mean 'rounds'?"),
    ],
)
def test_bad_values_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        updated(RunConfig(), changes)
    assert str(refusal.value).startswith(message)
    assert "\n" not in str(refusal.value)


def test_a_nested_mistake_is_named_with_its_path() -> None:
    with pytest.raises(ConfigError) as refusal:
        from_dict({"train": {"momentun": 0.5}})
    assert str(refusal.value) == "config field 'train.momentun' is not known; did you mean 'train.momentum'?"
    with pytest.raises(ConfigError) as refusal:
        from_dict({"train": 3})
    assert str(refusal.value) == "train=3 is not a table; write [train] with its fields below"


def test_whole_numbers_and_comma_lists_are_taken_where_they_fit() -> None:
    config = updated(RunConfig(), {"train.lr": 1, "eval.probes": "grad-norm,drift"})
    assert (config.train.lr, config.eval.probes) == (1.0, ("grad-norm", "drift"))


def test_local_work_is_one_epoch_unless_said() -> None:
    config = RunConfig()
    assert config.local_work() == ("epochs", 1)
    assert replace(config, train=replace(config.train, local_steps=7)).local_work() == ("steps", 7)
    assert replace(config, train=replace(config.train, local_epochs=2)).local_work() == ("epochs", 2)


@pytest.mark.parametrize(("rounds", "every", "expected"), [(40, 0, 2), (5, 0, 1), (100, 7, 7)])
def test_about_twenty_evaluations_by_default(rounds: int, every: int, expected: int) -> None:
    assert updated(RunConfig(), {"rounds": rounds, "eval.every": every}).eval_every == expected
