"""Numbers of parts: none takes the place of another in silence."""

from __future__ import annotations

from dataclasses import replace

import pytest

import tiny
from fednorm.core.method import Method, Part, Pass, Phase, Rule
from fednorm.core.numbers import RESERVED
from fednorm.errors import ConfigError
from fednorm.methods import known_methods, parse
from fednorm.pieces.changes import add_loss, add_transform
from fednorm.pieces.grads import ClipNorm
from fednorm.pieces.losses import Proximal


@pytest.mark.parametrize("name", RESERVED)
def test_a_number_with_the_name_of_the_trainings_is_refused(name: str) -> None:
    told = (
        f"'mine' has a number called '{name}', which would replace that of the training; "
        f"give it a name of its own, such as 'mine.{name}'"
    )
    method = Method(name="mine", stages=((Phase(rule=Rule(numbers={name: 9.0})),),))
    with pytest.raises(ConfigError) as refusal:
        tiny.plan(method)
    assert str(refusal.value) == told


def test_an_expression_is_refused_when_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    known = dict(known_methods())

    def steep() -> Part:
        return Part(add_loss(Proximal(), lr=9.0))

    known["steep"] = replace(known["fedprox"], name="steep", make=steep)
    monkeypatch.setattr("fednorm.core.registry._REGISTRY", known)
    with pytest.raises(
        ConfigError, match=r"^'fedavg\+steep' has a number called 'lr', which would replace that of the"
    ):
        parse("fedavg+steep")


def test_two_parts_with_another_value_of_one_number_are_refused() -> None:
    told = "two parts have a number called 'prox.mu', 0.1 and 0.5; give each a name of its own, such as 'mine.prox.mu'"
    once = add_loss(Proximal(), **{"prox.mu": 0.1})(Method())
    for more in (add_loss, add_transform):
        piece = Proximal() if more is add_loss else ClipNorm()
        with pytest.raises(ConfigError) as refusal:
            more(piece, **{"prox.mu": 0.5})(once)  # type: ignore[arg-type]
        assert str(refusal.value) == told
    twice = add_loss(Proximal(), **{"prox.mu": 0.1})(once)
    assert twice.phases[0].rule.numbers == {"prox.mu": 0.1}


def test_two_passes_with_another_value_of_one_number_are_refused() -> None:
    """A client's numbers hold for its whole work."""
    then = (Pass(rule=Rule(numbers={"mu": 2.0})),)
    method = Method(name="mine", stages=((Phase(rule=Rule(numbers={"mu": 1.0}), then=then),),))
    with pytest.raises(
        ConfigError, match=r"^two parts have a number called 'mu', 1.0 and 2.0; give each a name of its"
    ):
        tiny.plan(method)


def test_no_built_in_method_has_such_a_number() -> None:
    for name in known_methods():
        numbers = {
            key for phase in parse(name).all_phases.values() for each in phase.passes for key in each.rule.numbers
        }
        assert not numbers & set(RESERVED)
