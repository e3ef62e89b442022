"""Methods and all they are made of compare, hash, print and travel: no functions made on the way."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields, is_dataclass
from types import FunctionType
from typing import Any

import pytest
import torch

from fednorm.core.frozen import FrozenDict
from fednorm.core.merge import Fusable, Mean
from fednorm.core.method import Method, Part, Phase, Rule, Stay
from fednorm.core.report import BySize, Uniform
from fednorm.core.state import Kind, Policy
from fednorm.core.step import ObserveStep, TrainStep
from fednorm.methods import known_methods, parse
from fednorm.pieces.changes import add_loss, chain, keep
from fednorm.pieces.losses import Proximal
from fednorm.pieces.merges import Pooled, ServerAdam
from fednorm.pieces.newcomers import Track
from fednorm.pieces.phases import hold, with_loss, with_merge, with_policy, with_weights
from fednorm.pieces.switches import After, WhenLossesAgree
from fednorm.pieces.weights import ByLoss

EXPRESSIONS = [
    *known_methods(),
    "fixbn+fedprox",
    "fixbn(at=window,window=3)",
    "fedwon(residual=nf)+fedprox(norm=l2)",
    "fedbn(newcomer=pooled)+tsmobn",
    "feddna(q=uniform)",
    "decoupled+global-momentum",
    "posthoc(mode=ema)",
]
every_method = pytest.mark.parametrize("expression", EXPRESSIONS)


@every_method
def test_a_method_parsed_twice_is_one(expression: str) -> None:
    one, other = parse(expression), parse(expression)
    assert one == other
    assert hash(one) == hash(other)
    assert all(a == b and hash(a) == hash(b) for a, b in zip(one.parts, other.parts, strict=True))


@every_method
def test_a_method_survives_a_plain_pickle_and_a_copy(expression: str) -> None:
    method = parse(expression)
    assert pickle.loads(pickle.dumps(method)) == method  # noqa: S301  our own bytes
    assert copy.deepcopy(method) == method


@every_method
def test_a_method_can_be_read(expression: str) -> None:
    text = repr(parse(expression))
    assert not any(sign in text for sign in ("<function", "<lambda>", "functools", "0x"))


def pieces_of(value: Any) -> Iterator[Any]:
    """Everything inside a value, by fields, items and entries."""
    yield value
    inner: list[Any] = []
    if is_dataclass(value) and not isinstance(value, type):
        inner = [getattr(value, each.name) for each in fields(value)]
    elif isinstance(value, dict):
        inner = [*value.keys(), *value.values()]
    elif isinstance(value, tuple | frozenset):
        inner = [*value]
    for each in inner:
        yield from pieces_of(each)


@every_method
def test_no_piece_is_a_function(expression: str) -> None:
    assert not [piece for piece in pieces_of(parse(expression)) if isinstance(piece, FunctionType)]


@every_method
def test_pieces_say_what_they_do(expression: str) -> None:
    for piece in pieces_of(parse(expression)):
        if is_dataclass(piece):
            assert piece.__doc__
            assert not piece.__doc__.startswith(f"{type(piece).__name__}("), "dataclass writes such a text itself"


def test_methods_with_other_settings_differ() -> None:
    assert parse("fedadam(lr=0.1)").stages != parse("fedadam(lr=0.2)").stages
    assert parse("gn").surgery[0][1] != parse("gn(groups=4)").surgery[0][1]
    assert After(1) != After(1.0), "round 1 and all rounds"
    assert (BySize(), ByLoss("all")) == (BySize(), ByLoss("all"))
    assert ByLoss("all") != ByLoss("last_batch")
    assert BySize() != Uniform()


def test_pieces_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        ServerAdam(0.1, 0.9, 0.99, 1e-3).lr = 0.2  # pyright: ignore[reportAttributeAccessIssue]
    assert repr(Track(0.5)) == "Track(variance='mean', momentum=0.5)"


CHANGES = [
    lambda d: d.__setitem__("b", 2),
    lambda d: d.__delitem__("a"),
    lambda d: d.__ior__({"b": 2}),
    lambda d: d.update(b=2),
    lambda d: d.setdefault("b", 2),
    lambda d: d.pop("a"),
    lambda d: d.popitem(),
    lambda d: d.clear(),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_frozen_dict_stays_as_it_is(change: Any) -> None:
    frozen = FrozenDict(a=1)
    with pytest.raises(TypeError, match="a FrozenDict cannot change; make another one"):
        change(frozen)
    assert frozen == {"a": 1}
    assert (frozen | {"b": 2}, {**frozen, "b": 2}) == ({"a": 1, "b": 2}, {"a": 1, "b": 2})


def test_mappings_that_are_given_become_frozen() -> None:
    numbers, policy = {"mu": 0.1}, {Kind.WEIGHT: Policy.LOCAL}
    phase = Phase(rule=Rule(numbers=numbers), policy=policy)
    numbers["mu"], policy[Kind.WEIGHT] = 0.2, Policy.SHARED
    assert (phase.rule.numbers["mu"], phase.policy[Kind.WEIGHT]) == (0.1, Policy.LOCAL)
    assert hash(phase) == hash(Phase(rule=Rule(numbers={"mu": 0.1}), policy={Kind.WEIGHT: Policy.LOCAL}))


def test_a_phase_prints_what_is_its_own() -> None:
    assert repr(Phase()) == "Phase()"
    look = Phase(name="look", step=ObserveStep(), lockstep=1)
    assert repr(look) == "Phase(name='look', step=ObserveStep(), lockstep=1)"
    assert Phase().step == TrainStep()


def test_one_phase_is_changed_as_all_phases_are() -> None:
    phase = with_loss(with_policy(Phase(), {Kind.AFFINE: Policy.LOCAL}), Proximal(), {"prox.mu": 0.1})
    change = chain(keep(affine="local"), add_loss(Proximal(), **{"prox.mu": 0.1}))
    assert change(Method()).stages == ((phase,),)
    assert hold(phase, Kind.STATISTIC).rule.hold == {Kind.STATISTIC}
    assert set(with_weights(Phase(), Uniform()).weigh.values()) == {Uniform()}
    some = with_merge(Phase(), Pooled(), Kind.STATISTIC).merge
    assert (some[Kind.STATISTIC], some[Kind.WEIGHT]) == (Pooled(), Mean())


def test_a_switch_says_whether_it_looks_at_reports() -> None:
    assert not Stay().uses_reports
    assert not After(0.5).uses_reports
    assert WhenLossesAgree(0.1, 5).uses_reports


def test_a_merge_says_whether_it_treats_all_elements_alike() -> None:
    assert isinstance(Mean(), Fusable)
    assert not isinstance(Pooled(), Fusable)
    stack, weights = torch.tensor([[1.0, 2.0], [3.0, 6.0]]), torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert Mean().joined(stack, weights).tolist() == [2.0, 4.0]


def test_own_parts_may_be_plain_functions() -> None:
    def change(method: Method) -> Method:
        return keep(affine="local")(method)

    assert Part(change) == Part(change)
    assert change(Method()).phases[0].policy[Kind.AFFINE] is Policy.LOCAL
