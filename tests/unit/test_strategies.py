"""Strategies by name: the grammar that they share with methods, what is refused, and that they are data."""

from __future__ import annotations

import math
import pickle
import re
from dataclasses import FrozenInstanceError
from itertools import pairwise
from typing import Any

import pytest

from fednorm.core import strategy_registry
from fednorm.core.strategy import Strategy
from fednorm.errors import ConfigError
from fednorm.methods import known_methods, parse
from fednorm.pieces.discounts import Constant, Cosine, Exponential, Hinge, Linear, Polynomial, Steps
from fednorm.strategies import joined, known_strategies, register_strategy, split
from fednorm.strategies import parse as parse_strategy


def test_no_name_is_a_strategy_and_a_method() -> None:
    assert known_strategies().keys() >= {"fedasync", "fedbuff", "afl-dw", "ca2fl", "sync", "fedrevive"}
    assert not known_strategies().keys() & known_methods().keys()


@pytest.mark.parametrize("name", known_strategies())
def test_strategies_are_data(name: str) -> None:
    info, made = known_strategies()[name], parse_strategy(name)
    assert info.summary
    assert info.paper
    assert made.name == name
    assert made == parse_strategy(name)
    assert pickle.loads(pickle.dumps(made)) == made  # noqa: S301
    with pytest.raises(FrozenInstanceError):
        made.rate = 2.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "name", "method"),
    [
        ("fedbuff(b=10)+fedbn", "fedbuff(b=10)", "fedbn"),
        ("fedbn + fedbuff", "fedbuff", "fedbn"),
        ("sync", "sync", "fedavg"),
        ("fedasync(lr=0.5,staleness=hinge)+fixbn(at=0.5)+gn", "fedasync(lr=0.5,staleness=hinge)", "fixbn(at=0.5)+gn"),
    ],
)
def test_a_strategy_is_told_from_the_method_beside_it(text: str, name: str, method: str) -> None:
    strategy, rest = split(text)
    assert (strategy.name, rest) == (name, method)
    assert strategy == parse_strategy(name)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("fedbuf(b=3)+fedbn", "strategy 'fedbuf' is not known; did you mean 'fedbuff'?"),
        ("fedbn+gn", "'fedbn+gn' names no strategy; put one before it, as in fedbuff(b=10)+fedbn"),
        ("fedbuff+sync", "'fedbuff' and 'sync' are both strategies; keep one"),
        ("fedbuff(b=0)", "'fedbuff(b=0)': b=0 updates make no version; give 1 or more"),
        ("fedbuff(lr=0)", "'fedbuff(lr=0)': lr=0.0 is no rate of a server; give a number above 0"),
        ("fedbuff(b=x)", "'fedbuff(b=x)': 'x' does not fit; b takes a whole number"),
        ("fedbuff(a=-1)", "'fedbuff(a=-1)': a=-1.0 makes no discount of stale updates; give 0 or more"),
        ("fedbuff(fresh=-1)", "'fedbuff(fresh=-1)': fresh=-1 is no staleness; give 0 or more"),
        (
            "fedbuff(fresh=3)",
            "'fedbuff(fresh=3)': fresh=3 is for statistics=fresh, not values; add it, or leave it out",
        ),
        (
            "fedasync(lr=1.5)",
            "'fedasync(lr=1.5)': lr=1.5 would mix in more than the client's model; give a number above 0, up to 1",
        ),
        ("afl-dw(s_max=0)", "'afl-dw(s_max=0)': s_max=0.0 is no staleness; give a number above 0"),
        (
            "fedbuff(size=3)",
            "option of 'fedbuff' 'size' is not known; known: a, b, fresh, lr, staleness, statistics, weights.",
        ),
    ],
)
def test_what_is_wrong_with_an_expression(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        split(text)
    assert str(error.value) == told


def test_one_strategy_alone_is_read_as_such() -> None:
    with pytest.raises(ConfigError) as error:
        parse_strategy("fedbuff+fedbn")
    assert str(error.value) == (
        "strategy 'fedbuff+fedbn' names more than a strategy; give all of it as the method, --method 'fedbuff+fedbn'"
    )
    given = Strategy(name="mine")
    assert parse_strategy(given) is given


def test_a_strategy_may_add_parts_to_the_method() -> None:
    def adds(method: object) -> str:
        return "gn"

    strategy = Strategy(name="mine", adds=adds)
    assert joined(strategy, "fedprox").name == "fedprox+gn"
    assert joined(strategy, parse("fedprox")).name == "fedprox+gn"
    with pytest.raises(ConfigError, match=r"^'ln' and 'gn' cannot be combined"):
        joined(strategy, "ln")
    assert joined(Strategy(name="plain"), "fedprox") == parse("fedprox")


@pytest.mark.parametrize("method", ["fixbn", "fedbn(report=true)", "posthoc"])
def test_trackers_that_nobody_named_are_explained(method: str) -> None:
    with pytest.raises(ConfigError) as error:
        joined(parse_strategy("fedrevive"), method)
    assert str(error.value).endswith(
        " ('tracker' is what FedRevive's default statistics=tracker adds; fedrevive(statistics=bn) matches BatchNorm's "
        "own statistics in its place, fedrevive(statistics=none) none)"
    )


def test_what_is_registered_must_be_a_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy_registry, "_REGISTRY", dict(known_strategies()))

    @register_strategy("a-method", summary="returns something else")
    def a_method() -> object:
        return parse("fedavg")

    with pytest.raises(ConfigError) as error:
        parse_strategy("a-method")
    assert str(error.value) == "strategy 'a-method' must return a Strategy; it returned Method"


DISCOUNTS = [
    Constant(),
    Polynomial(0.5),
    Hinge(10.0, 4.0),
    Cosine(75.0),
    Linear(0.005),
    Exponential(0.005),
    Steps(150.0),
]


@pytest.mark.parametrize("discount", DISCOUNTS, ids=lambda each: type(each).__name__)
def test_a_discount_begins_at_one_and_never_rises(discount: object) -> None:
    found = [Strategy(name="each", discount=discount).counts(age) for age in range(400)]  # type: ignore[arg-type]
    assert found[0] == 1.0
    assert all(0 <= later <= earlier for earlier, later in pairwise(found))


@pytest.mark.parametrize("count", [math.nan, -0.5, math.inf, None])
def test_a_discount_that_is_no_share_is_refused(count: Any) -> None:
    odd = Strategy(name="odd", discount=lambda staleness: count)
    told = f"'odd' counts an update that is 2 versions old {count!r}; give 0 or more, and finite"
    with pytest.raises(ConfigError, match=re.escape(told)):
        odd.counts(2)
    assert odd.counts(0) == 1.0
