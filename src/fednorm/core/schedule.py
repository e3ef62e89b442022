"""What goes by a share of the rounds: the learning rate, and the round up to which a share lasts."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

from fednorm.core.expression import parse_term
from fednorm.errors import ConfigError, unknown

_NAMES = ("constant", "step", "cosine", "linear")


def last_round(share: float, rounds: int) -> int:
    """The last of the rounds that a share of all of them spans, rounded down, for all that goes by such a share.

    A product that binary fractions put a hair below a whole number counts as that number, as 0.29 of 100 does.

    >>> last_round(0.5, 25), last_round(0.29, 100), last_round(1.0, 40)
    (12, 29, 40)
    """
    return math.floor(share * rounds + 1e-9)


def lr_factor(schedule: str, round: int, rounds: int) -> float:
    """The factor on the learning rate in round `round` of `rounds`, counted from 1.

    `step` multiplies by `factor` after each of the shares `at` (`last_round`), so `step` alone keeps the rate for the
    first half of the rounds. In a run too short for a share of one round, the first round still has the whole rate.

    >>> [round(lr_factor("step", r, 8), 3) for r in (1, 4, 5, 6, 7)]
    [1.0, 1.0, 0.1, 0.1, 0.01]
    >>> lr_factor("step(factor=0.5,at=0.25)", 3, 8)
    0.5
    """
    return _rule(schedule)(round, rounds)


@lru_cache(maxsize=64)
def _rule(schedule: str) -> Callable[[int, int], float]:
    """A schedule as a function of the round and the number of rounds, read once: every round of a run asks for it."""
    term = parse_term(schedule, "schedule", "step(factor=0.1,at=0.5/0.75)")
    if term.name not in _NAMES:
        raise unknown("schedule", term.name, _NAMES)
    known: set[str] = {"factor", "at"} if term.name == "step" else set()
    for option in term.options.keys() - known:
        raise unknown(f"option of schedule '{term.name}'", option, known)
    if term.name == "cosine":
        return lambda round, rounds: 0.5 * (1 + math.cos(math.pi * ((round - 1) / rounds)))
    if term.name == "linear":
        return lambda round, rounds: 1 - (round - 1) / rounds
    if term.name == "constant":
        return lambda round, rounds: 1.0
    try:
        marks = [float(mark) for mark in str(term.options.get("at", "0.5/0.75")).split("/")]
        factor = float(term.options.get("factor", 0.1))
    except ValueError:
        raise ConfigError(f"schedule '{schedule}' needs numbers, as in step(factor=0.1,at=0.5/0.75)") from None
    _check_step(schedule, marks, factor)
    return lambda round, rounds: factor ** sum(round > max(1, last_round(mark, rounds)) for mark in marks)


def warmup_factor(warmup: float, round: int, rounds: int) -> float:
    """The factor of a warm-up on top of a schedule: it rises by equal steps to 1 in the first `warmup` rounds.

    A warm-up below 1 is a share of all rounds, and lasts at least one. It is a factor on what the schedule says, whose
    own marks stay where they are, counted in all rounds.

    >>> [warmup_factor(4, r, 10) for r in (1, 2, 4, 5)], warmup_factor(0.2, 1, 10)
    ([0.25, 0.5, 1.0, 1.0], 0.5)
    """
    length = warmup if warmup >= 1 else max(1, last_round(warmup, rounds))
    return min(1.0, round / length)


def check_warmup(warmup: float, rounds: int) -> None:
    """Refuse a warm-up that is neither a number of rounds nor a share of them."""
    if not (0 <= warmup < 1 or (warmup >= 1 and math.isfinite(warmup) and warmup == int(warmup))):
        raise ConfigError(f"train.warmup={warmup} is out of range; give a whole number of rounds, or a share below 1")
    if warmup > rounds:
        raise ConfigError(
            f"train.warmup={warmup:g} is longer than the run of {rounds} rounds; give fewer rounds, or a share below 1"
        )


def _check_step(schedule: str, marks: list[float], factor: float) -> None:
    """Refuse drops that no round would see, and factors that make no learning rate."""
    in_range = all(0 < mark < 1 for mark in marks)  # not so for NaN
    if not in_range or any(later <= earlier for earlier, later in pairwise(marks)):
        raise ConfigError(
            f"schedule '{schedule}': at={'/'.join(f'{mark:g}' for mark in marks)} is out of range; "
            "give shares of the rounds above 0 and below 1, ascending, as in at=0.5/0.75"
        )
    if not 0 < factor < math.inf:
        raise ConfigError(f"schedule '{schedule}': factor={factor:g} is out of range; give a number above 0")
