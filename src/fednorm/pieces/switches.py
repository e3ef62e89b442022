"""When a run goes from one stage to the next: rules about memory, progress and reports."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from fednorm.core.method import Memory, Progress
from fednorm.core.report import Report
from fednorm.core.schedule import last_round
from fednorm.errors import ConfigError


def last_round_before(at: float | int, rounds: int) -> int:
    """The last round T* of the first stage: a fraction of all rounds (rounded down), or a round's number.

    >>> last_round_before(0.5, 41), last_round_before(90, 100), last_round_before(1.0, 40)
    (20, 90, 40)
    """
    return last_round(at, rounds) if isinstance(at, float) else at


@dataclass(frozen=True)
class After:
    """Stage 0 up to and including round T*, stage 1 from then on (t > T*, FixBN's Algorithm 1)."""

    at: float | int
    is_fraction: bool = field(init=False, repr=False)
    """Keeps round 1 apart from all rounds, 1.0, which Python holds equal."""
    uses_reports: ClassVar[bool] = False

    def __post_init__(self) -> None:
        at = self.at
        object.__setattr__(self, "is_fraction", isinstance(at, float))
        if isinstance(at, float) and not 0 <= at <= 1:
            raise ConfigError(f"at={at} is not a fraction of the rounds; give 0.0 to 1.0, or a whole number of rounds")
        if isinstance(at, int) and at < 0:
            raise ConfigError(f"at={at} is no round; give a whole number from 0, or a fraction such as 0.5")

    def __call__(self, memory: Memory, progress: Progress, reports: Sequence[Report]) -> tuple[Memory, int]:
        return memory, int(progress.round > last_round_before(self.at, progress.rounds))


@dataclass(frozen=True)
class WhenLossesAgree:
    """Stage 1 once the participants' losses had a (population) deviation of at most eps for `rounds` rounds in a row.

    A round above eps starts the count anew; the switch latches (FedBS).
    """

    eps: float
    rounds: int
    which: str = "last_epoch"
    uses_reports: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.eps < 0:
            raise ConfigError(
                f"eps={self.eps}, rounds={self.rounds} cannot be a rule; give eps of 0 or more and 1 round or more"
            )

    def __call__(self, memory: Memory, progress: Progress, reports: Sequence[Report]) -> tuple[Memory, int]:
        if memory.get("switched"):
            return memory, 1
        agree = bool(reports) and statistics.pstdev(report.losses[self.which] for report in reports) <= self.eps
        count = memory.get("count", 0) + 1 if agree else 0
        return {"count": count, "switched": count >= self.rounds}, int(count >= self.rounds)


@dataclass(frozen=True)
class WhenSettled:
    """Stage 1 once what the clients report has settled (FixBN, appendix B.6).

    V_m is the mean of (D_{m,i} - D_{m,t})^2 over the reports i of client m in the last W rounds, t its latest;
    `center="mean"` takes the mean of these reports in place of the latest. From round W on, the largest (or the mean) V
    of all clients with at least two such reports is compared with tau; without such a client nothing has settled. The
    switch latches.
    """

    scalar: str
    window: int
    tau: float
    center: Literal["current", "mean"]
    reduce: Literal["max", "mean"]
    uses_reports: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.window < 2 or self.tau <= 0:
            raise ConfigError(
                f"window={self.window}, tau={self.tau} cannot be a rule; give a window of 2 or more and tau above 0"
            )

    def __call__(self, memory: Memory, progress: Progress, reports: Sequence[Report]) -> tuple[Memory, int]:
        if memory.get("switched"):
            return memory, 1
        last = progress.round - 1
        # Lists and not tuples: what is remembered is equal after it was a file.
        told: dict[str, list[list[float]]] = {}
        for client, rows in memory.get("told", {}).items():
            told[client] = [row for row in rows if row[0] > last - self.window]
        for report in reports:
            told.setdefault(str(report.client), []).append([last, report.scalars[self.scalar]])
        spreads = [self._spread([value for _, value in rows]) for rows in told.values() if len(rows) > 1]
        worst = max(spreads, default=math.inf) if self.reduce == "max" else statistics.fmean(spreads or [math.inf])
        if last >= self.window and worst < self.tau:
            return {"switched": True}, 1
        return {"told": {client: rows for client, rows in told.items() if rows}}, 0

    def _spread(self, values: list[float]) -> float:
        middle = values[-1] if self.center == "current" else statistics.fmean(values)
        return math.fsum((value - middle) ** 2 for value in values) / len(values)
