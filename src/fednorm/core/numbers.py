"""The named numbers of clients' rules: each name means one number, and the training's own stay the training's."""

from __future__ import annotations

from collections.abc import Mapping

from fednorm.core.method import Method
from fednorm.errors import ConfigError

RESERVED = ("lr", "momentum", "weight_decay", "steps")
"""Numbers that every client's work has already."""


def joined(numbers: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """The numbers of two rules together; a name that means another number in each is refused.

    >>> joined({"a.mu": 0.1}, {"b.mu": 0.5})
    {'a.mu': 0.1, 'b.mu': 0.5}
    """
    for name in numbers.keys() & more.keys():
        if numbers[name] != more[name]:
            raise ConfigError(
                f"two parts have a number called '{name}', {numbers[name]} and {more[name]}; "
                f"give each a name of its own, such as 'mine.{name}'"
            )
    return {**numbers, **more}


def refuse_numbers(method: Method) -> None:
    """Refuse numbers of a method's rules that would take the place of another number in silence."""
    for phase in method.all_phases.values():
        found: dict[str, float] = {}
        for each in phase.passes:
            found = joined(found, each.rule.numbers)
        for name in sorted(found.keys() & set(RESERVED)):
            raise ConfigError(
                f"'{method.name}' has a number called '{name}', which would replace that of the training; "
                f"give it a name of its own, such as 'mine.{name}'"
            )
