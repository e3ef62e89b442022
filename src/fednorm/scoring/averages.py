"""What a newcomer gets of entries that clients keep: their mean over clients seen, read a few hundred at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fednorm.core.newcomer import Newcomer
from fednorm.core.reductions import wide
from fednorm.core.state import Entry, Kind, Tree


class ClientTrees(Protocol):
    """Where the local entries of clients can be read, some clients at a time."""

    def holding(self, keys: Iterable[str]) -> list[int]:
        """Ids of the clients that have all these entries, ascending."""
        ...

    def stacks(self, clients: Sequence[int]) -> Iterator[Tree]:
        """The entries of many clients in the order given, some at a time, with a leading client axis."""
        ...


def averaged_local(
    local: Sequence[Entry], newcomer: Newcomer, store: ClientTrees, only: Collection[int] | None = None
) -> Tree:
    """The uniform mean, over all clients seen, of what they keep local; counters by maximum, variances as told.

    With `only`, those of them alone, unless none of them keeps anything yet.

    The sums are those of `pieces.merges`: float64, by ascending client id, whatever the number of clients.
    """
    local = [entry for entry in local if entry.kind is not Kind.OPTIMIZER and not entry.extra]
    clients = store.holding(entry.key for entry in local) if local else []
    if only is not None:
        clients = [client for client in clients if client in only] or clients
    if not clients:
        return {}
    counters = [entry for entry in local if entry.kind is Kind.COUNTER]
    numbers = [entry for entry in local if entry.kind is not Kind.COUNTER]
    mean = _Mean(len(clients))
    most: Tree = {}
    for stack in store.stacks(clients):
        mean.add([stack[entry.key] for entry in numbers])
        for entry in counters:
            top = stack[entry.key].amax(0)
            # States read from the file are on the host, those of the last round may be on a device.
            most[entry.key] = torch.maximum(most.get(entry.key, top).to(top.device), top)
    found = {**most, **mean.of(numbers)}
    if newcomer.pools_variances:
        found |= _pooled(_moments(numbers), found, store, clients)
    return {entry.key: found[entry.key].to(entry.dtype) for entry in local}


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


def _pooled(moments: list[tuple[Entry, Entry]], means: Tree, store: ClientTrees, clients: Sequence[int]) -> Tree:
    """Variances of the clients' mixture: the mean of var_k + (mu_k - mu)^2; a deviation is the root of that."""

    def spread_of(stack: Tree, mean: Entry, spread: Entry) -> Tensor:
        own = wide(stack[spread.key])
        inside = own.square() if spread.part == "running_std" else own
        return inside + (wide(stack[mean.key]) - means[mean.key].to(own.device)).square()

    average = _Mean(len(clients))
    for stack in store.stacks(clients):
        average.add([spread_of(stack, mean, spread) for mean, spread in moments])
    spreads = [spread for _, spread in moments]
    found = average.of(spreads)
    return {
        spread.key: found[spread.key].to(spread.dtype).sqrt() if spread.part == "running_std" else found[spread.key]
        for spread in spreads
    }


class _Mean:
    """A float64 mean, folded one client at a time, so that it does not depend on how clients are stacked."""

    def __init__(self, count: int) -> None:
        self._share = 1 / count
        self._total: Tensor | None = None

    def add(self, stacks: Sequence[Tensor]) -> None:
        """Add some clients' tensors, each stacked over them; joined first, since most are tiny."""
        if not stacks:
            return
        rows = torch.cat([wide(stack).flatten(1) if stack.dim() > 1 else wide(stack)[:, None] for stack in stacks], 1)
        for row in rows.unbind(0):
            if self._total is None:
                self._total = row * self._share
            else:
                self._total.add_(row.to(self._total.device), alpha=self._share)

    def of(self, entries: Sequence[Entry]) -> Tree:
        """The mean of each entry, in the order they were added."""
        if self._total is None:
            return {}
        parts = self._total.split([torch.Size(entry.shape).numel() for entry in entries])
        return {entry.key: part.view(entry.shape) for entry, part in zip(entries, parts, strict=True)}
