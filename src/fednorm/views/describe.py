"""A method on a model, entry by entry: what each tensor is, what happens to it, and what that costs on the wire."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fednorm.core.method import Method, Phase
from fednorm.core.optim import Optimizer
from fednorm.core.state import Entry, Kind, Policy
from fednorm.halves.merging import DOWN, UP, Schema
from fednorm.halves.prepared import Prepared
from fednorm.running.run import lockstep_cost


def describe(prepared: Prepared, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Entries with kind, policy, shape and bytes, their totals, and what surgery had to say.

    A policy that changes in the course of a run reads `shared -> frozen`. Optimizer buffers are listed where they
    outlive a round.
    """
    phases = phases_of(prepared.method)
    schemas = [prepared.schema(phase, optimizer) for phase in phases]
    listing: list[tuple[Entry, str]] = []
    for entry in _each_once(schemas):
        policies = [schema[entry.key][1] for schema in schemas if entry.key in schema]
        if entry.kind is not Kind.OPTIMIZER or set(policies) != {Policy.FRESH}:
            listing.append((entry, in_time(policies)))
    sent = exchanges(prepared, optimizer)
    first = [line for line in sent if line["stage"] == 1]
    return {
        "method": prepared.method.name,
        "entries": [
            {"key": e.key, "kind": e.kind.value, "policy": policy, "shape": list(e.shape), "bytes": e.bytes}
            for e, policy in listing
        ],
        "totals": {
            "entries": len(listing),
            "bytes": sum(entry.bytes for entry, _ in listing),
            "by_kind": _totals((entry.kind.value, entry) for entry, _ in listing),
            "by_policy": _totals((policy, entry) for entry, policy in listing),
            "up_per_round": sum(line["up"] for line in first),
            "down_per_round": sum(line["down"] for line in first),
            "exchanges": sent,
        },
        "notes": list(prepared.notes),
    }


def exchanges(prepared: Prepared, optimizer: Optimizer | None = None) -> list[dict[str, Any]]:
    """Bytes that one client sends and receives in each exchange: the phases of every stage, then the finish."""
    method = prepared.method
    named = [(number, phase) for number, stage in enumerate(method.stages, 1) for phase in stage]
    lines = []
    for stage, phase in [*named, *(("finish", phase) for phase in method.finish)]:
        _, up, down = cost(method, phase, prepared.schema(phase, optimizer))
        lines.append({"stage": stage, "phase": phase.name, "up": up, "down": down})
    return lines


def cost(method: Method, phase: Phase, schema: Schema) -> tuple[int, int, int]:
    """(exchanges, bytes up, bytes down) of one client in a phase; nothing where data is not apart."""
    if method.data == "union" or phase.union:
        return 0, 0, 0
    steps, extra = lockstep_cost(phase, schema)
    up, down = (sent(schema, *policies) + extra for policies in (UP, DOWN))
    return 1 + steps if up or down else 0, up, down


def sent(schema: Schema, *policies: Policy) -> int:
    """Bytes of the entries that have one of the policies."""
    return sum(entry.bytes for entry, policy in schema.values() if policy in policies)


def phases_of(method: Method) -> tuple[Phase, ...]:
    """All phases of a method in the order of time."""
    return method.phases + method.finish


def in_time(policies: Iterable[Policy]) -> str:
    """Policies in the order of time, each change once.

    >>> in_time([Policy.SHARED, Policy.SHARED, Policy.FROZEN])
    'shared -> frozen'
    """
    changes: list[str] = []
    for policy in policies:
        if not changes or changes[-1] != policy.value:
            changes.append(policy.value)
    return " -> ".join(changes)


def _each_once(schemas: list[dict[str, tuple[Entry, Policy]]]) -> list[Entry]:
    return list({entry.key: entry for schema in schemas for entry, _ in schema.values()}.values())


def _totals(items: Iterable[tuple[str, Entry]]) -> dict[str, dict[str, int]]:
    totals: dict[str, dict[str, int]] = {}
    for name, entry in items:
        line = totals.setdefault(name, {"entries": 0, "bytes": 0})
        line["entries"] += 1
        line["bytes"] += entry.bytes
    return totals
