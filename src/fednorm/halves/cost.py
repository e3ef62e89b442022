"""What an exchange costs one client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fednorm.core.method import Method, Phase
from fednorm.core.state import Entry, Kind, Policy


class Cost(NamedTuple):
    """Messages each way, and bytes up and down."""

    exchanges: int
    up: int
    down: int


def cost_of(method: Method, phase: Phase, schema: Mapping[str, tuple[Entry, Policy]]) -> Cost:
    """The cost of one client's part in an exchange; nothing where all data is in one place.

    Clients in lock-step agree, in each batch norm, on the mean, then the variance, then on the gradients of both: 3
    exchanges of 4 numbers a channel in all (FedTAN).
    """
    if method.data == "union" or phase.union:
        return Cost(0, 0, 0)
    up = sum(entry.bytes for entry, policy in schema.values() if policy in (Policy.SHARED, Policy.REPORTED))
    down = sum(entry.bytes for entry, policy in schema.values() if policy in (Policy.SHARED, Policy.FROZEN))
    means = [entry for entry, _ in schema.values() if entry.kind is Kind.STATISTIC and entry.part == "running_mean"]
    together = 4 * phase.lockstep * sum(entry.bytes for entry in means)
    return Cost(1 + 3 * phase.lockstep * len(means) if up or down else 0, up + together, down + together)
