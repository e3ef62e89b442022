"""A method on a model, entry by entry: what each tensor is, what happens to it, and what that costs on the wire."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fednorm.core.method import Phase
from fednorm.core.optim import Optimizer
from fednorm.core.state import Entry, Kind, Policy
from fednorm.halves.cost import Cost, exchange_cost
from fednorm.halves.prepared import Prepared


def describe_model(prepared: Prepared, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Entries with kind, policy, shape and bytes, their totals, and what surgery had to say.

    A policy that changes during a run reads `shared -> frozen`. Optimizer buffers are listed where they
    outlive a round.
    """
    in_order = (*prepared.method.phases, *prepared.method.finish)
    schemas = [prepared.schema(phase, optimizer) for phase in in_order]
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
    """What each exchange costs one client: the phases of every stage, then the finish, then the query."""
    method = prepared.method
    named: list[tuple[int | str, str, Phase]] = [
        (number, f"stage {number}", phase) for number, stage in enumerate(method.stages, 1) for phase in stage
    ]
    named += [("finish", "after training", phase) for phase in method.finish]
    named += [("query", "before every test", method.query)] if method.query else []
    return [
        {"stage": stage, "when": when, "phase": phase.name, **cost(prepared, phase, optimizer)._asdict()}
        for stage, when, phase in named
    ]


def cost(prepared: Prepared, phase: Phase, optimizer: Optimizer | None = None) -> Cost:
    """What a phase of a prepared method costs one client."""
    return exchange_cost(prepared.method, phase, prepared.schema(phase, optimizer))


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
