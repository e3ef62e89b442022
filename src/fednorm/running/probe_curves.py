"""What probes saw, by round: from the rows of a run alone."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable

from fednorm.running.records import RoundRow

Curve = tuple[list[int], list[float]]
"""Rounds, and a number for each."""


def probe_curve(rows: Iterable[RoundRow], probe: str, phase: str = "train") -> Curve:
    """A probe's number in each round that has it: of the round itself, or the unweighted mean over its clients."""
    rounds: list[int] = []
    values: list[float] = []
    for row in rows:
        of_round = row.get("round_probes", {}).get(phase, {})
        each = [of_round[probe]] if probe in of_round else list(_of_clients(row, probe, phase).values())
        if each:
            rounds.append(row["round"])
            values.append(math.fsum(each) / len(each))
    return rounds, values


def probe_variance(rows: Iterable[RoundRow], probe: str, window: int, phase: str = "train") -> Curve:
    """The variance of a client's number over its last `window` rounds, mean over clients; from a full window on.

    Rounds in which nobody was looked at do not count, and clients with fewer numbers are left out.
    """
    seen: dict[int | str, deque[float]] = defaultdict(lambda: deque(maxlen=window))
    rounds: list[int] = []
    values: list[float] = []
    for row in rows:
        for client, value in _of_clients(row, probe, phase).items():
            seen[client].append(value)
        full = [each for each in seen.values() if len(each) == window]
        if full and _of_clients(row, probe, phase):
            rounds.append(row["round"])
            values.append(math.fsum(map(_variance, full)) / len(full))
    return rounds, values


def _of_clients(row: RoundRow, probe: str, phase: str) -> dict[int, float]:
    clients = row.get("probes", {}).get(phase, {})
    return {client: own[probe] for client, own in clients.items() if probe in own}


def _variance(values: deque[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / len(values)
