"""When a run goes from one stage to the next: functions of memory, progress and reports."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fednorm.errors import ConfigError
from fednorm.method import Memory, Progress, Switch
from fednorm.pieces.weights import Report


def last_round_before(at: float | int, rounds: int) -> int:
    """The last round T* of the first stage: a fraction of all rounds (rounded down), or a round's number.

    >>> last_round_before(0.5, 41), last_round_before(90, 100), last_round_before(1.0, 40)
    (20, 90, 40)
    """
    return math.floor(at * rounds) if isinstance(at, float) else at


def after(at: float | int) -> Switch:
    """Stage 0 up to and including round T*, stage 1 from then on (t > T*, FixBN's Algorithm 1)."""
    if isinstance(at, float) and not 0 <= at <= 1:
        raise ConfigError(f"at={at} is not a fraction of the rounds; give 0.0 to 1.0, or a whole number of rounds")
    if isinstance(at, int) and at < 0:
        raise ConfigError(f"at={at} is no round; give a whole number from 0, or a fraction such as 0.5")

    def switch(memory: Memory, progress: Progress, reports: Sequence[Report]) -> tuple[Memory, int]:
        return memory, int(progress.round > last_round_before(at, progress.rounds))

    return switch
