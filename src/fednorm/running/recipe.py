"""TOML recipes: a file with any of the config's fields, and for comparisons the methods and seeds."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fednorm.errors import ConfigError, first_line, unknown
from fednorm.files import read_bounded, refuse_depth


@dataclass(frozen=True)
class Recipe:
    """What a file asks for: fields of the config as nested tables, and what to compare."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    methods: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()


def read_recipe(path: Path) -> Recipe:
    """Read a file; its fields are checked by the config itself."""
    try:
        tables = refuse_depth(tomllib.loads(read_bounded(path, foreign=False).decode()))
    except FileNotFoundError:
        raise ConfigError(f"'{path}' does not exist; give a TOML file with fields of the config") from None
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be read: {error.strerror}; give a TOML file") from None
    except RecursionError:
        raise ConfigError(f"'{path}' is not TOML: nested too deeply") from None
    except ValueError as error:  # no TOML, no UTF-8, or a number of thousands of digits
        raise ConfigError(f"'{path}' is not TOML: {first_line(error)}") from None
    comparison = tables.pop("compare", {})
    if not isinstance(comparison, dict):
        raise ConfigError(f"'{path}': compare is not a table; write [compare] with methods and seeds below")
    for key in comparison:
        if key not in ("methods", "seeds"):
            raise unknown("recipe field", f"compare.{key}", ["compare.methods", "compare.seeds"])
    return Recipe(
        tables,
        _listed(comparison, "methods", str, '["fedavg", "fixbn"]'),
        _listed(comparison, "seeds", int, "[0, 1, 2]"),
    )


def _listed(table: Mapping[str, Any], key: str, kind: type, example: str) -> tuple[Any, ...]:
    value = table.get(key, [])
    if not isinstance(value, list) or any(type(item) is not kind for item in value):
        raise ConfigError(f"compare.{key}={value!r} does not fit; write {key} = {example}")
    return tuple(value)


def to_toml(fields: Mapping[str, Any], prefix: str = "") -> str:
    """Nested plain values as TOML; a field that is None is left out, since TOML has no word for it.

    >>> print(to_toml({"rounds": 3, "init": None, "train": {"lr": 0.1, "schedule": "step"}}))
    rounds = 3
    <BLANKLINE>
    [train]
    lr = 0.1
    schedule = "step"
    """
    plain = [f"{key} = {_value(value)}" for key, value in fields.items() if not isinstance(value, Mapping | None)]
    tables = [
        f"[{prefix}{key}]\n{to_toml(value, f'{prefix}{key}.')}"
        for key, value in fields.items()
        if isinstance(value, Mapping)
    ]
    return "\n\n".join(filter(None, ["\n".join(plain), *tables]))


def _value(value: Any) -> str:
    """A TOML value; JSON writes strings, numbers, true, false and lists in the same way."""
    return json.dumps(value)
