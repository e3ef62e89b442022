"""Results over virtual time: when a score was first reached, and how stale the updates were on their way there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from fednorm.running.records import RoundRow, RunResult

LEVELS = tuple(range(10, 100, 10))
"""Scores in percent whose times are told."""
_BARS = "▁▂▃▄▅▆▇█"


def is_timed(run: RunResult) -> bool:
    """Whether a run was played on a clock."""
    return "time" in run["curves"]


def time_to(run: RunResult, level: float, protocol: str = "pooled") -> float | None:
    """Virtual time at which a run's score was first at a level; None where it never was, or no clock was running.

    Scores are known for the versions that were scored, so this is the time of the first of them.
    """
    curves: Mapping[str, Sequence[float]] = run["curves"]  # pyright: ignore[reportAssignmentType]
    better = run.get("higher_is_better", True)
    for time, score in zip(curves.get("time", ()), curves.get(protocol, ()), strict=False):
        if score >= level if better else score <= level:
            return time
    return None


def score_at(run: RunResult, time: float, protocol: str = "pooled") -> float | None:
    """The score of the last version that was scored by a virtual time; None where none was, or no clock was running."""
    curves: Mapping[str, Sequence[float]] = run["curves"]  # pyright: ignore[reportAssignmentType]
    known = zip(curves.get("time", ()), curves.get(protocol, ()), strict=False)
    return next((score for when, score in reversed(list(known)) if when <= time), None)


def times_to(runs: Sequence[RunResult]) -> dict[str, list[float]]:
    """For the levels that all runs reached, the times at which each did."""
    found: dict[str, list[float]] = {}
    for level in LEVELS if all(run.get("percent", True) for run in runs) else ():
        times = [time_to(run, level) for run in runs]
        if all(time is not None for time in times):
            found[str(level)] = [time for time in times if time is not None]
    return found


def staleness_of(rows: Iterable[RoundRow]) -> dict[str, int]:
    """How many updates were how stale in some rows, the freshest first."""
    counts = Counter(age for row in rows for age in row.get("staleness", ()))
    return {str(age): counts[age] for age in sorted(counts)}


def histogram(staleness: Mapping[str, int], width: int = 12) -> str:
    """How stale updates were, in a few characters: the least, a bar for each of some ranges of equal width, the most.

    >>> histogram({"0": 4, "1": 8, "3": 1}), histogram({"7": 2}), histogram({})
    ('0 ▄█▁▂ 3', '7 █ 7', '-')
    """
    ages = sorted(map(int, staleness))
    if not ages:
        return "-"
    low, high = ages[0], ages[-1]
    count = min(width, high - low + 1)
    bars = [0] * count
    for age, many in staleness.items():
        bars[(int(age) - low) * count // (high - low + 1)] += many
    most = max(bars)
    return f"{low} {''.join(_BARS[max(1, many * 7 // most) if many else 0] for many in bars)} {high}"
