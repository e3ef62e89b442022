"""Expressions become methods; what does not combine is refused with both names."""

from __future__ import annotations

import itertools
from typing import Literal

import pytest

from fednorm.core.expression import parse_term
from fednorm.core.method import Method, Part
from fednorm.core.registry import checked_options, register
from fednorm.core.state import Kind, Policy
from fednorm.errors import ConfigError
from fednorm.methods import known_methods, parse
from fednorm.pieces.changes import Nothing


def refusal_of(expression: str) -> str:
    with pytest.raises(ConfigError) as refusal:
        parse(expression)
    return str(refusal.value)


def test_fedavg_changes_nothing_but_names_itself() -> None:
    method = parse("fedavg")
    assert method.stages == Method().stages
    assert (method.name, method.needs) == ("fedavg", frozenset())


def test_a_method_passes_through() -> None:
    method = Method(name="mine")
    assert parse(method) is method


def test_policies_of_the_batch_norm_methods() -> None:
    def policies(expression: str, stage: int = 0) -> dict[str, str]:
        return {kind.value: policy.value for kind, policy in parse(expression).stages[stage][0].policy.items()}

    fedavg = dict.fromkeys(("weight", "affine", "statistic", "counter", "extra"), "shared") | {"optimizer": "fresh"}
    local = dict.fromkeys(("statistic", "counter"), "local")
    assert policies("fedavg") == policies("fixbn") == policies("gn") == fedavg
    assert policies("silobn") == {**fedavg, **local}
    assert policies("fedbn") == {**fedavg, **local, "affine": "local"}
    assert policies("fixbn", stage=1) == {**fedavg, **dict.fromkeys(local, "frozen")}
    assert set(policies("standalone").values()) == {"local"}


def test_fixbn_holds_statistics_but_not_the_affine() -> None:
    before, after = (stage[0].rule.hold for stage in parse("fixbn").stages)
    assert (before, after) == (frozenset(), {Kind.STATISTIC})


def test_parts_add_up() -> None:
    method = parse("fixbn(at=3) + fedprox(mu=0.5)")
    assert method.name == "fixbn(at=3)+fedprox(mu=0.5)"
    assert len(method.stages) == 2
    for (phase,) in method.stages:
        assert len(phase.rule.losses) == 1
        assert phase.rule.numbers == {"prox.mu": 0.5}


def test_the_order_of_parts_that_do_not_meet_does_not_matter() -> None:
    for names in itertools.permutations(["fixbn", "fedprox"]):
        method = parse("+".join(names))
        assert [phase.policy[Kind.STATISTIC] for (phase,) in method.stages] == [Policy.SHARED, Policy.FROZEN]
        assert all(phase.rule.losses for phase in method.phases)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("fedporx", "method 'fedporx' is not known; did you mean 'fedprox'? (`fednorm methods` lists all {count})"),
        (
            "fedbn+silobn",
            "'fedbn' and 'silobn' cannot be combined: both decide the policy of counter; keep one",
        ),
        ("gn+ln", "'gn' and 'ln' cannot be combined: both decide the choice of the norm layers; keep one"),
        (
            "fedprox+fedprox(mu=0.1)",
            "'fedprox' and 'fedprox(mu=0.1)' cannot be combined: both decide the loss of the proximal term; keep one",
        ),
        ("fedavg(at=1)", "'fedavg' takes no options but was given 'at'; write just 'fedavg'"),
        ("fedprox(nu=1)", "option of 'fedprox' 'nu' is not known; did you mean 'mu'?"),
        ("fedprox(mu=word)", "'fedprox(mu=word)': 'word' does not fit; mu takes a number"),
        ("gn(groups=2.5)", "'gn(groups=2.5)': 2.5 does not fit; groups takes a whole number"),
        ("gn(groups=true)", "'gn(groups=True)': True does not fit; groups takes a whole number"),
        ("gn(groups=0)", "group norm with 0 groups cannot work; give a number of groups of at least 1"),
        ("fixbn(at=half)", "'fixbn(at=half)': 'half' does not fit; at takes a number or 'window'"),
        ("fixbn(at=1.5)", "at=1.5 is not a fraction of the rounds; give 0.0 to 1.0, or a whole number of rounds"),
        ("fixbn(at=-1)", "at=-1 is no round; give a whole number from 0, or a fraction such as 0.5"),
        ("fedprox(mu=-1)", "mu=-1.0 would push clients away from the server's model; give 0 or more"),
    ],
)
def test_mistakes_are_named(expression: str, message: str) -> None:
    assert refusal_of(expression) == message.format(count=len(known_methods()))


def test_a_whole_number_is_a_fraction_where_a_fraction_is_wanted() -> None:
    assert parse("fedprox(mu=1)").phases[0].rule.numbers == {"prox.mu": 1.0}


def test_none_is_a_word_where_an_option_takes_it() -> None:
    def chosen(style: Literal["none", "all"] = "all", word: str = "x", bound: float | None = 1.0) -> None: ...

    term = parse_term("chosen(style=none,word=none,bound=none)", "method", "")
    assert checked_options(term, chosen) == {"style": "none", "word": "none", "bound": None}


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ConfigError) as refusal:
        register("fedavg", paper="-", summary="-")(lambda: Part(Nothing()))
    assert str(refusal.value) == "method 'fedavg' is registered already; choose another name"
    with pytest.raises(ConfigError) as refusal:
        register("my method", paper="-", summary="-")(lambda: Part(Nothing()))
    assert str(refusal.value) == "method name 'my method' is not usable; expected letters, digits, '-' and '_'"
    assert "my method" not in known_methods()


def test_needs_follow_from_the_policies() -> None:
    needs = {
        name: known_methods()[name].needs
        for name in ("fedavg", "fedbn", "silobn", "fixbn", "standalone", "centralized")
    }
    stateful = {name for name, each in needs.items() if "client_state" in each}
    assert stateful == {"fedbn", "silobn", "standalone"}
