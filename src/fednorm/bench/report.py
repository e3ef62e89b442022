"""What a benchmark found: measurements by section, one table, one JSON."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fednorm.bench.timing import Timing
from fednorm.files import disk_errors, write_json

FEW = 3
"""Quiet timings below which all of a variant's timings are used."""


@dataclass(frozen=True)
class Measured:
    """Timings of one variant of a workload, in the unit that is shown."""

    workload: str
    variant: str
    unit: str
    values: tuple[float, ...]
    quiet: int = 0
    """of them, how many had the cores for themselves"""
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def to_json(self) -> dict[str, Any]:
        facts = {"workload": self.workload, "variant": self.variant, "unit": self.unit, "median": self.median}
        facts |= {"low": min(self.values), "high": max(self.values), "timings": len(self.values), "quiet": self.quiet}
        return facts | ({"note": self.note} if self.note else {})


def measured(
    workload: str, unit: str, times: Mapping[str, Sequence[Timing]], notes: Mapping[str, str], factor: float = 1.0
) -> list[Measured]:
    """The measurements of a race: its quiet timings, or all of them where fewer than three are."""
    found = []
    for variant, all_turns in times.items():
        turns = [turn for turn in all_turns if not math.isnan(turn.seconds)]
        quiet = [turn for turn in turns if turn.quiet]
        values = tuple(factor * turn.seconds for turn in (quiet if len(quiet) >= FEW else turns))
        if values:
            found.append(Measured(workload, variant, unit, values, len(quiet), notes.get(variant, "")))
    return found


@dataclass
class Section:
    """One benchmark's settings, measurements and what follows from them."""

    name: str
    settings: dict[str, Any]
    measurements: list[Measured] = field(default_factory=list)
    references: dict[str, str] = field(default_factory=dict)
    """by workload, the variant that ratios in the table refer to"""
    keys: dict[str, dict[str, Any]] = field(default_factory=dict)
    """numbers with a fixed name, such as `ratio.plain/stacked`, by workload"""
    details: dict[str, Any] = field(default_factory=dict)
    """what is too long for a table, by workload"""

    def of(self, workload: str) -> dict[str, float]:
        """Medians by variant."""
        return {each.variant: each.median for each in self.measurements if each.workload == workload}

    def key(self, name: str, workload: str, value: Any) -> None:
        self.keys.setdefault(name, {})[workload] = value

    def to_json(self) -> dict[str, Any]:
        found = {"settings": self.settings, "measurements": [each.to_json() for each in self.measurements]}
        return found | ({"details": self.details} if self.details else {})

    def rows(self) -> list[list[str]]:
        """Lines of the table."""
        lines = []
        for index, each in enumerate(self.measurements):
            new = index == 0 or self.measurements[index - 1].workload != each.workload
            reference = self.of(each.workload).get(self.references.get(each.workload, ""))
            lines.append(
                [
                    f"{self.name}: {each.workload}" if new else "",
                    each.variant,
                    f"{number(each.median)} {each.unit}",
                    f"{number(min(each.values))}-{number(max(each.values))}" if len(each.values) > 1 else "",
                    f"{each.median / reference:.2f}" if reference else "",
                    each.note,
                ]
            )
        return lines


@dataclass
class Report:
    """All sections of one run of the command."""

    facts: dict[str, Any]
    sections: list[Section] = field(default_factory=list)
    interrupted: bool = False

    def to_json(self) -> dict[str, Any]:
        keys: dict[str, Any] = {}
        for section in self.sections:
            keys |= section.keys
        return {
            "benchmark": "fednorm bench",
            **self.facts,
            "interrupted": self.interrupted,
            **keys,
            "sections": {section.name: section.to_json() for section in self.sections},
        }

    def lines(self) -> list[str]:
        """The numbers with a name, below the table."""
        return [
            f"{name}: " + ", ".join(f"{workload}: {_text(value)}" for workload, value in found.items())
            for section in self.sections
            for name, found in section.keys.items()
        ]

    def write(self, path: Path) -> None:
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, self.to_json(), indent=1)


def number(value: float) -> str:
    """Three digits that count.

    >>> number(0.04321), number(1.2345), number(845.2), number(64000)
    ('0.0432', '1.23', '845', '64000')
    """
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{name} {_text(each)}" for name, each in value.items())
    return number(value) if isinstance(value, int | float) else str(value)


class Progress:
    """What a benchmark says while it works: lines, and on a terminal also what it does right now."""

    def __init__(self, quiet: bool, save: Callable[[], None] | None = None) -> None:
        self.quiet = quiet
        self.save = save
        self.terminal = sys.stderr.isatty()

    def workload(self, text: str) -> None:
        """A workload begins; what was measured before is put away, for a machine that may be taken from us."""
        if self.save:
            self.save()
        self.line(text)

    def line(self, text: str) -> None:
        if not self.quiet:
            print(f"{self._clear()}{text}", file=sys.stderr, flush=True)

    def now(self, text: str) -> None:
        """Written over by what comes next."""
        if self.terminal and not self.quiet:
            print(f"{self._clear()}  {text}", end="", file=sys.stderr, flush=True)

    def done(self) -> None:
        if self.terminal and not self.quiet:
            print(self._clear(), end="", file=sys.stderr, flush=True)

    def _clear(self) -> str:
        return "\r\x1b[K" if self.terminal else ""
