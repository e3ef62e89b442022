"""What a newcomer gets of entries that clients keep: their mean over all clients seen, read a few hundred at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from fednorm.method import Phase
from fednorm.plan import Plan
from fednorm.server import keys_with
from fednorm.state import Entry, Kind, Policy, Tree
from fednorm.store import Store


def averaged_local(plan: Plan, phase: Phase, store: Store) -> Tree:
    """The uniform mean, over all clients seen, of what they keep local; counters by maximum, variances as told.

    The sums are those of `pieces.merges`: float64, by ascending client id, whatever the number of clients.
    """
    schema = plan.schema(phase)
    local = {key: schema[key][0] for key in keys_with(schema, Policy.LOCAL)}
    local = {key: entry for key, entry in local.items() if entry.kind is not Kind.OPTIMIZER}
    clients = store.holding(local) if local else []
    if not clients:
        return {}
    share = 1 / len(clients)
    totals: Tree = {}
    for stack in store.stacks(clients):
        for key, entry in local.items():
            if entry.kind is Kind.COUNTER:
                _raise_to(totals, key, stack[key])
            else:
                _add(totals, key, _wide(stack[key]), share)
    if plan.method.newcomer.variance == "pooled":
        totals |= _pooled(_moments(local.values()), totals, store, clients)
    return {key: totals[key].to(entry.dtype) for key, entry in local.items()}


def _moments(local: Iterable[Entry]) -> list[tuple[Entry, Entry]]:
    """(mean, variance or standard deviation) of every layer that has both."""
    layers: dict[str, dict[str, Entry]] = defaultdict(dict)
    for entry in local:
        if entry.kind is Kind.STATISTIC:
            layers[entry.layer][entry.part] = entry
    return [
        (parts["running_mean"], parts[spread])
        for parts in layers.values()
        for spread in ("running_var", "running_std")
        if {"running_mean", spread} <= parts.keys()
    ]


def _pooled(moments: list[tuple[Entry, Entry]], means: Tree, store: Store, clients: list[int]) -> Tree:
    """Variances of the clients' mixture: the mean of var_k + (mu_k - mu)^2; a deviation is the root of that."""
    share = 1 / len(clients)
    totals: Tree = {}
    for stack in store.stacks(clients):
        for mean, spread in moments:
            own = _wide(stack[spread.key])
            own = own.square() if spread.part == "running_std" else own
            centre = means[mean.key]
            _add(totals, spread.key, own + (_wide(stack[mean.key]) - centre.to(own.device)).square(), share)
    for _, spread in moments:
        if spread.part == "running_std":
            totals[spread.key] = totals[spread.key].to(spread.dtype).sqrt()
    return totals


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", torch.float64) if tensor.device.type == "mps" else tensor.to(torch.float64)


def _add(totals: Tree, key: str, rows: Tensor, share: float) -> None:
    """Add the rows of a stack one by one, so that the sum does not depend on how clients are stacked."""
    for row in rows.unbind(0):
        if key in totals:
            # States read from the file are on the host, those of the last round may be on a device.
            totals[key].add_(row.to(totals[key].device), alpha=share)
        else:
            totals[key] = row * share


def _raise_to(totals: Tree, key: str, rows: Tensor) -> None:
    most = rows.amax(0)
    totals[key] = torch.maximum(totals[key], most.to(totals[key].device)) if key in totals else most
