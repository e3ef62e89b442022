"""What probes see of a merge: the server's running statistics around it, and how those of the clients differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fednorm.core.method import Facts
from fednorm.core.probe import Merged, Probe
from fednorm.core.reductions import cohort, weighted_sum, wide
from fednorm.core.state import Kind, Tree
from fednorm.halves.prepared_phase import PreparedPhase
from fednorm.halves.training import Outcome


class Watch:
    """Looks at a server before a merge, and again inside the context of the merge once it is done."""

    def __init__(self, probes: Iterable[Probe], facts: Facts, server: Tree) -> None:
        self._probes = [probe for probe in probes if probe.join is not None]
        self._keys: list[str] = []
        if self._probes:
            self._keys = [entry.key for entry in facts.entries.values() if entry.kind is Kind.STATISTIC]
        self._before = self._vector(server)

    def seen(self, server: Tree, phase: PreparedPhase, clients: Sequence[Outcome], total: int) -> dict[str, float]:
        """What probes tell of a merge over `total` clients, of which these were trained here."""
        if not self._probes:
            return {}
        own = {*phase.shared, *phase.reported, *phase.kept}
        sent = [key for key in self._keys if key in own]
        merged = Merged(self._before, self._vector(server), self._variance(server, sent, clients, total))
        return {probe.name: float(probe.join(merged)) for probe in self._probes if probe.join is not None}

    def _vector(self, tree: Tree) -> Tensor:
        """The statistics of a tree, copied: a server's tree may be views that follow every merge."""
        parts = [wide(tree[key]).flatten() for key in self._keys]
        return torch.cat(parts) if parts else torch.zeros(0)

    def _variance(self, server: Tree, keys: Sequence[str], clients: Sequence[Outcome], total: int) -> Tensor:
        if not keys:
            return torch.zeros(0)
        around = torch.cat([wide(server[key]).flatten() for key in keys])  # or small variances would be lost
        rows = [_statistics(each, keys) - around for each in clients]
        stack = torch.stack(rows) if rows else around.new_zeros(0, len(around))
        shares = cohort().own(torch.full((total,), 1 / total, dtype=torch.float64, device=stack.device))
        mean = weighted_sum(stack, shares)
        return (weighted_sum(stack.square(), shares) - mean.square()).clamp(min=0)


def _statistics(outcome: Outcome, keys: Sequence[str]) -> Tensor:
    tree = {**outcome.update.shared, **outcome.update.reported, **outcome.kept}
    return torch.cat([wide(tree[key]).flatten() for key in keys])
