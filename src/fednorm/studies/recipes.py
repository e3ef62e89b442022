"""How an experiment is played here: one TOML file each, whose comments say what was read into the paper."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from fednorm.errors import ConfigError, unknown

_KEYS = ("extends", "place", "seeds", "about", "run", "methods", "axes", "skip", "score", "figure", "variants", "quick")


@dataclass(frozen=True)
class Score:
    """How a number of the paper is read off a run."""

    protocol: str = "pooled"
    """which model was tested on which data, as in docs/records.md"""
    select: str | None = None
    """key of a setting whose value picks one domain of a run, or `average` for the mean of all"""
    names: Mapping[str, str] = field(default_factory=dict)
    """what the data call a domain, where the paper has another word"""
    at_time: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """on a clock: by axis and its value, the virtual time at which scores are read; else after the last version"""
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    """what stands for a domain in a quick run, whose data have other ones"""


@dataclass(frozen=True)
class StudyRecipe:
    """The fields of the runs of one experiment."""

    run: Mapping[str, Any]
    """fields of a config, nested"""
    methods: Mapping[str, Any]
    """by the paper's key: an expression, or a table of `method` and the fields it `set`s"""
    axes: Mapping[str, Mapping[str, Mapping[str, Any]]]
    """by key and value of a setting: fields of the config; `method` has expressions, and `set` fields, of single
    methods"""
    score: Score
    about: str = ""
    place: int | None = None
    """place in the queue; None: behind all that have one"""
    seeds: tuple[int, ...] = (0, 1, 2)
    figure: Mapping[str, Any] = field(default_factory=dict)
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """other readings of the paper: fields they `set`, for all or in `axes` for some values of an axis, `methods` they
    change, what they are `about`, and `where`: values of axes that they are readings of, where not all are"""
    skip: tuple[Mapping[str, list[str]], ...] = ()
    """combinations that a figure does not have: values of `method` and of axes; what matches all of one is left out"""
    quick: Mapping[str, Any] = field(default_factory=dict)
    """fields set on top of all for a small version on embedded data"""
    quick_axes: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    """of some axes, the values that a quick run has, with the fields they set; `quick.axes` in the file"""
    quick_methods: Mapping[str, str] = field(default_factory=dict)
    """expressions of some methods in a quick run; `quick.methods` in the file"""
    quick_set: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """fields of some methods in a quick run; `quick.set` in the file"""
    quick_at_time: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """virtual times at which scores of a quick run are read; `quick.at_time` in the file"""


@cache
def read_study_recipe(id: str) -> StudyRecipe:
    """The recipe of an experiment."""
    whole = _tables(id)
    tables = dict(whole)
    for key in tables:
        if key not in _KEYS:
            raise unknown(f"field of the recipe {id}", key, _KEYS)
    tables.pop("extends", None)
    tables["score"] = Score(**tables.get("score", {}))
    tables["seeds"] = tuple(tables.get("seeds", (0, 1, 2)))
    tables["skip"] = tuple(tables.get("skip", ()))
    quick = dict(whole.get("quick", {}))
    tables |= {f"quick_{key}": quick.pop(key, {}) for key in ("axes", "methods", "set", "at_time")}
    tables["quick"] = quick
    return StudyRecipe(**{"run": {}, "methods": {}, "axes": {}, **tables})


def _tables(name: str) -> dict[str, Any]:
    """The tables of a file over those of the file it extends."""
    file = files("fednorm.studies") / "recipes" / f"{name}.toml"
    try:
        own = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no recipe for '{name}'; `fednorm reproduce --list` names all") from None
    return _merged(_tables(own["extends"]), own) if "extends" in own else own


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Two nested tables in one, the values of the second winning.

    >>> _merged({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}})
    {'a': {'b': 3, 'c': 2}}
    """
    both = {
        key: _merged(below[key], value) if isinstance(value, Mapping) and isinstance(below.get(key), Mapping) else value
        for key, value in above.items()
    }
    return {**below, **both}
