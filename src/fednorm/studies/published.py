"""What the papers report: every published number with the setting it belongs to, read from published.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from fednorm.errors import unknown


@dataclass(frozen=True)
class PublishedCell:
    """One number of a paper."""

    method: str
    """key of the method, such as fedavg_bn"""
    setting: Mapping[str, Any]
    """what sets it apart from other numbers of the experiment: a domain, a batch size, a partition"""
    mean: float
    std: float | None
    """spread over the paper's runs, where it was published"""


@dataclass(frozen=True)
class Experiment:
    """One table, figure or sentence of a paper."""

    id: str
    kind: str
    """table, text, or figure_only where no digits were published"""
    where: str
    """the paper and the label it has there"""
    dataset: str
    description: str
    cells: tuple[PublishedCell, ...]
    methods: tuple[str, ...]
    """keys of what was compared"""
    notes: tuple[str, ...]
    inferred: tuple[str, ...]
    """what the paper does not state"""


@cache
def experiments() -> Mapping[str, Experiment]:
    """Every experiment by its id, in the order of the papers."""
    stored = _stored()
    return {each["id"]: _experiment(each, stored["sources"]) for each in stored["experiments"]}


def find_experiment(id: str) -> Experiment:
    """An experiment by its id."""
    if id not in experiments():
        raise unknown("experiment", id, experiments(), "fednorm reproduce --list")
    return experiments()[id]


def method_label(key: str) -> str:
    """What a paper calls a method; a key that it does not have speaks for itself.

    >>> method_label("fedavg_gn"), method_label("fixbn + maintained momentum")
    ('FedAvg + GN', 'fixbn + maintained momentum')
    """
    return _stored()["methods"].get(key, key)


@cache
def _stored() -> dict[str, Any]:
    return json.loads((files("fednorm.studies") / "published.json").read_text(encoding="utf-8"))


def _experiment(stored: Mapping[str, Any], sources: Mapping[str, Any]) -> Experiment:
    cells = tuple(
        PublishedCell(each["method"], each["setting"], float(each["mean"]), each["std"]) for each in stored["results"]
    )
    labels = [f"{sources[each['source']]['title']}: {each['label']}" for each in stored["sources"]]
    return Experiment(
        id=stored["id"],
        kind=stored["kind"],
        where=labels[0],
        dataset=stored["dataset"],
        description=stored.get("description", ""),
        cells=cells,
        methods=tuple(stored.get("methods", dict.fromkeys(cell.method for cell in cells))),
        notes=tuple(stored.get("notes", ())),
        inferred=tuple(stored.get("inferred", ())),
    )
