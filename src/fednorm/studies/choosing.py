"""Some cells of a study by their settings, and what is said where settings name none."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fednorm.errors import ConfigError, unknown

Told = Mapping[str, str]
"""A cell's setting as texts, and as `variant` which reading it is."""


def is_at(told: Told, where: Mapping[str, Collection[str]]) -> bool:
    """Whether every axis that is named has one of the values that are named with it."""
    return all(told.get(axis) in values for axis, values in where.items())


def spelled(value: str) -> str:
    """A value that somebody typed as recipes spell it.

    >>> spelled("True"), spelled("iid")
    ('true', 'iid')
    """
    return value.lower() if value.lower() in ("true", "false") else value


def refuse_absent(
    id: str, cells: Sequence[Told], of_methods: Mapping[str, Sequence[Told]], where: Mapping[str, Collection[str]]
) -> None:
    """Refuse settings that no cell has: by a name that is not known, by other methods' values, or together.

    `cells` are those of the methods that were asked for, `of_methods` those of every method.
    """
    for axis, values in where.items():
        there = {told[axis] for told in cells if axis in told}
        if not there:
            raise unknown(f"setting of {id}", axis, {name for told in cells for name in told})
        for value in values:
            if value not in there:
                raise _elsewhere(id, axis, value, of_methods) or unknown(f"{axis} of {id}", value, there)
    if not any(is_at(told, where) for told in cells):
        raise ConfigError(f"no cell of {id} has {_named(where)} together{_beside(cells, where)}")


def _elsewhere(id: str, axis: str, value: str, of_methods: Mapping[str, Sequence[Told]]) -> ConfigError | None:
    """The error for a value that only other methods have; None where none has it."""
    having = [method for method, cells in of_methods.items() if any(told.get(axis) == value for told in cells)]
    if not having:
        return None
    return ConfigError(f"{axis}={value} of {id} is there for {', '.join(having)} alone; give one of these as --methods")


def _beside(cells: Sequence[Told], where: Mapping[str, Collection[str]]) -> str:
    """For each axis the values that it has beside all else that was asked for."""
    found = ""
    for axis in where:
        rest = {name: values for name, values in where.items() if name != axis}
        there = dict.fromkeys(told[axis] for told in cells if axis in told and is_at(told, rest))
        if there:
            found += f"; with {_named(rest)} there is {axis}={' or '.join(there)}"
    return found


def _named(where: Mapping[str, Collection[str]]) -> str:
    return " and ".join(f"{axis}={' or '.join(values)}" for axis, values in where.items())
