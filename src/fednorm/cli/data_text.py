"""What `fednorm data check` prints of a federation: a table that fits a terminal, and what is to be known beside it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from fednorm.cli.table import wrapped

WIDTH = 80
MOST_CLIENTS = 20
_LEGEND = (
    "label shift: share of a client's labels that differ from the mix of all (of numbers: distance of the means)",
    "feature shift: distance of a client's mean inputs from all clients' mean, in standard deviations",
)


def facts_text(facts: dict[str, Any]) -> list[str]:
    """The lines for people, none longer than a terminal; `facts` are those of `federation_facts`."""
    inputs, clients, examples = facts["inputs"], facts["clients"], facts["examples"]
    shape = " x ".join(map(str, inputs["shape"]))
    head = [
        facts["name"],
        f"{len(clients)} clients, {examples['train']} training and {examples['test']} test examples",
        f"inputs: {inputs['type']} {shape}, {_short(inputs['min'])} to {_short(inputs['max'])}; task: {facts['task']}; "
        f"model: {facts['model']}",
        *facts["notes"],
    ]
    few = len(clients) <= MOST_CLIENTS
    body = client_table(facts) if few else client_summary(facts)
    tail = [*_LEGEND, *_missing(facts, each=few)]
    return [*_fitting(head), "", *body, "", *_fitting(tail)]


def _fitting(lines: Sequence[str]) -> list[str]:
    return [part for line in lines for part in wrapped(line, WIDTH, "  ")]


def client_table(facts: dict[str, Any]) -> list[str]:
    """One line a client: a column for each class where that fits, else how many classes it has."""
    wide = _rows(facts, by_class=True)
    rows = wide if wide and _width(wide) <= WIDTH else _rows(facts, by_class=False)
    return aligned(rows)


def _rows(facts: dict[str, Any], by_class: bool) -> list[list[str]]:
    classes = facts["classes"] if "labels" in facts["clients"][0] else []
    joint = ["classes"] if classes else ["target"]
    middle = [_elided(name, 8) for name in classes] if by_class else joint
    rows = [["client", "train", "test", *middle, "label shift", "feature shift"]]
    for entry in facts["clients"]:
        labels = entry.get("labels", [])
        if by_class:
            cells = [str(count) if count else "-" for count in labels]
        elif classes:
            cells = [f"{sum(count > 0 for count in labels)} of {len(labels)}"]
        else:
            cells = [f"{_short(entry['target_min'])} to {_short(entry['target_max'])}" if entry["train"] else "-"]
        name = _elided(entry["name"], 20) + ("" if entry["trains"] else " (unseen)")
        shift = [f"{entry['label_shift']:.2f}", f"{entry['feature_shift']:.2f}"]
        rows.append([name, str(entry["train"]), str(entry["test"]), *cells, *shift])
    return rows if classes or not by_class else []


def client_summary(facts: dict[str, Any]) -> list[str]:
    """Of many clients the smallest, the middle and the largest of everything, and who is furthest from the others."""
    clients = facts["clients"]
    columns = {"training examples": "train", "test examples": "test", "label shift": "label_shift"}
    columns["feature shift"] = "feature_shift"
    rows = [["each client's", "least", "median", "most"]]
    for title, key in columns.items():
        values = sorted(entry[key] for entry in clients)
        rows.append([title, *(_short(value) for value in (values[0], statistics.median(values), values[-1]))])
    if "labels" in clients[0]:
        held = sorted(sum(count > 0 for count in entry["labels"]) for entry in clients)
        rows.append(["classes", *(_short(value) for value in (held[0], statistics.median(held), held[-1]))])
    furthest = sorted(clients, key=lambda entry: -entry["feature_shift"])[:5]
    names = ", ".join(f"{_elided(entry['name'], 20)} ({entry['feature_shift']:.2f})" for entry in furthest)
    return [*aligned(rows), f"furthest from the others: {names}"]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Names to the left, numbers to the right.

    >>> aligned([["client", "train"], ["a", "12"]])
    ['client  train', 'a          12']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        numbers = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        return "  ".join([row[0].ljust(widths[0]), *numbers])

    return [line(row) for row in rows]


def _missing(facts: dict[str, Any], each: bool) -> list[str]:
    """Which classes nobody trains on, and who lacks which."""
    names = facts["classes"]
    lines = []
    if facts["classes_without_training"]:
        lines.append(f"nobody trains on: {_some([names[label] for label in facts['classes_without_training']])}")
    lacking = [entry for entry in facts["clients"] if entry.get("missing_classes")]
    if lacking and not each:
        return [*lines, f"{len(lacking)} clients lack classes; --json says who lacks which"]
    for entry in lacking:
        classes = _some([names[label] for label in entry["missing_classes"]])
        lines.append(f"client {entry['name']} has no training example of {classes}")
    return lines


def _some(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names) if len(names) <= most else f"{', '.join(names[:most])} and {len(names) - most} more"


def _width(rows: Sequence[Sequence[str]]) -> int:
    return len(aligned(rows)[0])


def _elided(text: str, most: int) -> str:
    """A name that fits, its end left out.

    >>> _elided("hospital_of_the_north", 10)
    'hospital_…'
    """
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _short(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3g}"
