"""When a run goes from one stage to the next: rules about memory, progress and reports."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from fednorm.core.method import Memory, Progress
from fednorm.core.report import Report
from fednorm.errors import ConfigError


def last_round_before(at: float | int, rounds: int) -> int:
    """The last round T* of the first stage: a fraction of all rounds (rounded down), or a round's number.

    >>> last_round_before(0.5, 41), last_round_before(90, 100), last_round_before(1.0, 40)
    (20, 90, 40)
    """
    return math.floor(at * rounds) if isinstance(at, float) else at


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

    V_m = (1/W) sum_i (D_{m,i} - D_{m,t})^2 over the last W rounds of client m; `center="mean"` takes the window's mean
    in place of the current value. The switch waits for a whole window, compares the clients' largest (or mean) V with
    tau, and latches. Clients that rest keep the window they had.
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
        seen = {**memory.get("seen", {})}
        for report in reports:
            key = str(report.client)
            seen[key] = [*seen.get(key, []), report.scalars[self.scalar]][-self.window :]
        spreads = [self._spread(values) for values in seen.values() if len(values) == self.window]
        worst = max(spreads, default=math.inf) if self.reduce == "max" else statistics.fmean(spreads or [math.inf])
        settled = worst < self.tau
        return {"seen": seen, "switched": settled}, int(settled)

    def _spread(self, values: list[float]) -> float:
        middle = values[-1] if self.center == "current" else statistics.fmean(values)
        return math.fsum((value - middle) ** 2 for value in values) / len(values)
