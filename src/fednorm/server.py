"""The server's part of an exchange: refuse what cannot be used, merge the rest in client-id order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fednorm.errors import ConfigError
from fednorm.method import Phase
from fednorm.pieces.weights import Report
from fednorm.state import Entry, Kind, Policy, Tree

Schema = Mapping[str, tuple[Entry, Policy]]
UP = (Policy.SHARED, Policy.REPORTED)
"""Policies of entries a client sends."""
DOWN = (Policy.SHARED, Policy.FROZEN)
"""Policies of entries a client is sent."""


@dataclass(frozen=True)
class Update:
    """All that a client sends: its report, the entries to merge, and those the server keeps per client."""

    report: Report
    shared: Tree
    reported: Tree = field(default_factory=dict)

    @property
    def client(self) -> int:
        return self.report.client


def keys_with(schema: Schema, *policies: Policy) -> list[str]:
    """Keys of the entries that have one of the policies."""
    return [key for key, (_, policy) in schema.items() if policy in policies]


def flaw(update: Update, schema: Schema) -> str | None:
    """Why an update cannot be used, or None: wrong keys, shapes or types, values that are not finite or impossible."""
    expected = set(keys_with(schema, Policy.SHARED))
    for key in sorted(expected ^ update.shared.keys()):
        return f"'{key}' is {'missing' if key in expected else 'not expected'}"
    for key, tensor in update.shared.items():
        entry = schema[key][0]
        if tuple(tensor.shape) != entry.shape:
            return f"'{key}' has shape {tuple(tensor.shape)}, expected {entry.shape}"
        if tensor.dtype != entry.dtype:
            return f"'{key}' has type {tensor.dtype}, expected {entry.dtype}"
    if not isinstance(update.report.num_examples, int) or update.report.num_examples < 1:
        return f"its number of examples is {update.report.num_examples!r}, expected a whole number above 0"
    if _all_healthy(update.shared, schema):
        return None
    bad = next(key for key, tensor in update.shared.items() if not bool(_is_healthy(tensor, schema[key][0])))
    what = "is not finite" if not bool(torch.isfinite(update.shared[bad]).all()) else "is negative"
    return f"'{bad}' {what}"


def _all_healthy(tree: Tree, schema: Schema) -> bool:
    """One question to the device for all tensors; which one is at fault is asked only when something is."""
    floats = [tensor.flatten() for tensor in tree.values() if tensor.is_floating_point()]
    signed = [key for key in tree if _must_not_be_negative(schema[key][0])]
    checks = [torch.isfinite(torch.cat(floats)).all()] if floats else []
    checks += [(torch.cat([tree[key].flatten().to(torch.float32) for key in signed]) >= 0).all()] if signed else []
    return not checks or bool(torch.stack(checks).all())


def _must_not_be_negative(entry: Entry) -> bool:
    spreads = entry.kind is Kind.STATISTIC and entry.part in ("running_var", "running_std")
    return spreads or entry.kind is Kind.COUNTER


def _is_healthy(tensor: torch.Tensor, entry: Entry) -> torch.Tensor:
    if entry.kind is Kind.COUNTER:
        return (tensor >= 0).all()
    if entry.kind is Kind.STATISTIC and entry.part in ("running_var", "running_std"):
        return (torch.isfinite(tensor) & (tensor >= 0)).all()
    return torch.isfinite(tensor).all()


def merge_updates(
    phase: Phase, server: Tree, updates: Sequence[Update], schema: Schema, memory: Tree
) -> tuple[Tree, Tree]:
    """The server's next state and memory: shared entries merged a layer and a kind at a time, all others kept.

    Updates are sorted by client id first, so their order of arrival cannot change a bit.
    """
    if not updates:
        raise ConfigError("there are no updates to merge; at least one client must take part")
    updates = sorted(updates, key=lambda update: update.client)
    reports = [update.report for update in updates]
    groups: dict[Kind, dict[str, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for key in keys_with(schema, Policy.SHARED):
        entry = schema[key][0]
        groups[entry.kind][entry.layer].append(entry)
    held: dict[str, Tree] = defaultdict(dict)
    for key, value in memory.items():
        place, _, name = key.rpartition("|")
        held[place][name] = value
    merged, remembered = dict(server), dict(memory)
    for kind, layers in groups.items():
        sent = [
            {name: {entry.part: update.shared[entry.key] for entry in group} for name, group in layers.items()}
            for update in updates
        ]
        weights = phase.weigh[kind](reports, sent)
        for name, group in layers.items():
            old = {entry.part: server[entry.key] for entry in group}
            place = f"{phase.name}|{name}|{kind}"
            new, mine = phase.merge[kind](old, [each[name] for each in sent], weights, held[place])
            merged |= {entry.key: new[entry.part] for entry in group}
            remembered |= {f"{place}|{key}": value for key, value in mine.items()}
    return merged, remembered
