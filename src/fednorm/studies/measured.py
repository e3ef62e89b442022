"""What came out of a study: its cells with the numbers of their runs, and how methods rank."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from fednorm.running.over_time import score_at
from fednorm.running.records import score_of
from fednorm.running.results import Spread, spread
from fednorm.studies.library import Diverged, Library, Outcome, Record, in_one_precision
from fednorm.studies.study import StudyCell


@dataclass(frozen=True)
class Measured:
    """A cell with the runs it is read off: one a seed, all of one precision."""

    cell: StudyCell
    records: tuple[Record, ...]
    others: tuple[Outcome, ...] = ()
    """runs in another precision"""
    diverged: tuple[Diverged, ...] = ()
    """seeds that have no score"""

    @property
    def played(self) -> tuple[Outcome, ...]:
        """The runs of all its seeds."""
        return (*self.records, *self.diverged)

    @property
    def ours(self) -> Spread | None:
        """The score after the last round over the seeds that came to it; None where none is there yet."""
        return spread(final_of(record, self.cell) for record in self.records) if self.records else None

    @property
    def peak(self) -> Spread | None:
        """The best round of each seed, which was chosen on test data; None for a single domain."""
        if not self.records or self.cell.selected not in (None, "average"):
            return None
        return spread(max(curve_of(record, self.cell)) for record in self.records)

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's; None where a seed diverged, since a mean over the others flatters."""
        ours, published = self.ours, self.cell.published
        return None if ours is None or published is None or self.diverged else ours.mean - published.mean


def measured(
    cells: Sequence[StudyCell], library: Library, seeds: Sequence[int] = (), precision: str | None = None
) -> list[Measured]:
    """Cells with what the library has of them in a precision; where none is asked for, in the one with most seeds."""
    return [_measured(cell, library.outcomes(cell.config), seeds, precision) for cell in cells]


def _measured(cell: StudyCell, outcomes: Sequence[Outcome], seeds: Sequence[int], precision: str | None) -> Measured:
    asked = [outcome for outcome in outcomes if not seeds or outcome.seed in seeds]
    shown = in_one_precision(asked, precision)
    return Measured(
        cell,
        tuple(outcome for outcome in shown if isinstance(outcome, Record)),
        tuple(outcome for outcome in asked if outcome not in shown),
        tuple(outcome for outcome in shown if isinstance(outcome, Diverged)),
    )


def final_of(record: Record, cell: StudyCell) -> float:
    """The number of a cell after the last round, or at the virtual time that it names, or as soon as one is known."""
    if cell.time is not None:
        by_then = score_at(record.run, cell.time, cell.score.protocol)
        return curve_of(record, cell)[0] if by_then is None else by_then
    scores: Mapping[str, Any] = cast("Mapping[str, Any]", record.run["final"])[cell.score.protocol]
    if cell.selected in (None, "average"):
        return score_of(record.run["final"], cell.score.protocol, record.run["metric"])
    if "per_domain" in scores:
        return scores["per_domain"][cell.selected]
    of_domain = [
        scores["per_client"][str(client)]
        for client, domain in enumerate(record.client_domains)
        if domain == cell.selected and str(client) in scores["per_client"]
    ]
    return sum(of_domain) / len(of_domain)


def curve_of(record: Record, cell: StudyCell) -> list[float]:
    """The score by round, over all domains; `record.run["curves"]["round"]` has the rounds."""
    return cast("Mapping[str, list[float]]", record.run["curves"])[cell.score.protocol]


@dataclass(frozen=True)
class Ranking:
    """Whether our methods rank as the paper's do, over the pairs that the paper tells apart."""

    agree: int
    differ: tuple[str, ...]
    """pairs that rank otherwise, as text"""

    @property
    def pairs(self) -> int:
        return self.agree + len(self.differ)


@dataclass(frozen=True)
class Agreement:
    """Which of our means lie within the paper's spread around the published ones; within ours where it has none.

    Ours does not widen the paper's: a method that varies much here would agree with anything. Cells for which nobody
    knows a spread are in neither list.
    """

    within: tuple[Measured, ...]
    beyond: tuple[Measured, ...]

    @property
    def compared(self) -> int:
        return len(self.within) + len(self.beyond)


def agreement(results: Sequence[Measured]) -> Agreement:
    """Set every mean of ours beside the published one."""
    within, beyond = list[Measured](), list[Measured]()
    for each in results:
        difference, ours, published = each.difference, each.ours, each.cell.published
        if difference is None or ours is None or published is None:
            continue
        reach = published.std if published.std is not None else ours.std if ours.count > 1 else None
        if reach is not None:
            (within if abs(difference) <= reach else beyond).append(each)
    return Agreement(tuple(within), tuple(beyond))


def ranking(results: Sequence[Measured]) -> Ranking:
    """Compare every pair of methods under the same setting.

    A paper tells two methods apart where their means differ by more than their spreads together. Of ours the means
    count, and a tie is a difference.
    """
    agree, differ = 0, list[str]()
    for a, b in itertools.combinations(results, 2):
        told, other = a.cell.published, b.cell.published
        if not told or not other or a.cell.method == b.cell.method or not _same_setting(a.cell, b.cell):
            continue
        if a.diverged or b.diverged:
            continue
        gap, ours, theirs = told.mean - other.mean, a.ours, b.ours
        if ours is None or theirs is None or abs(gap) <= (told.std or 0.0) + (other.std or 0.0):
            continue
        if gap * (ours.mean - theirs.mean) > 0:
            agree += 1
        else:
            better, worse = (a, b) if gap > 0 else (b, a)
            setting = "".join(f", {key} {value}" for key, value in a.cell.setting.items())
            differ.append(f"{better.cell.method} is above {worse.cell.method} in the paper and not here{setting}")
    return Ranking(agree, tuple(differ))


def _same_setting(a: StudyCell, b: StudyCell) -> bool:
    """Whether two cells differ in their methods alone."""
    rest = [{key: value for key, value in cell.setting.items() if key not in cell.describing} for cell in (a, b)]
    return a.variant == b.variant and rest[0] == rest[1]
