"""What an exchange costs one client."""

from __future__ import annotations

from typing import NamedTuple

from fednorm.core.method import Method, Phase
from fednorm.core.state import Kind
from fednorm.halves.schema import DOWN, UP, Schema, keys_with


class Cost(NamedTuple):
    """Exchanges, and the bytes that one client sends and receives in them."""

    exchanges: int = 0
    up: int = 0
    down: int = 0


def exchange_cost(method: Method, phase: Phase, schema: Schema) -> Cost:
    """The cost of a phase whose entries have these policies; nothing where the phase sees everybody's data as one."""
    if method.sees_union(phase):
        return Cost()
    up, down = (sum(schema[key][0].bytes for key in keys_with(schema, *policies)) for policies in (UP, DOWN))
    together = _lockstep_cost(phase, schema)
    return Cost(1 + together.exchanges if up or down else 0, up + together.up, down + together.down)


def _lockstep_cost(phase: Phase, schema: Schema) -> Cost:
    """What the steps add that a cohort takes together.

    In each batch norm the cohort agrees on the mean, then the variance, then on the gradients of both: 3 exchanges of
    4 numbers a channel in all (FedTAN).
    """
    means = [entry for entry, _ in schema.values() if entry.kind is Kind.STATISTIC and entry.part == "running_mean"]
    sent = 4 * phase.lockstep * sum(entry.bytes for entry in means)
    return Cost(3 * phase.lockstep * len(means), sent, sent)
