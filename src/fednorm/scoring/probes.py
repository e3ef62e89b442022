"""The probes by name: named pure functions of a step, of a client's work or of a merge."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fednorm.core.method import Facts
from fednorm.core.probe import Merged, Probe
from fednorm.core.state import Kind, Tree
from fednorm.core.step import Carry
from fednorm.errors import unknown


def _norm(tree: Tree) -> Tensor:
    return torch.sqrt(torch.stack([value.square().sum() for value in tree.values()]).sum())


def _grad_norm(grads: Tree, before: Carry, after: Carry, facts: Facts) -> Tensor:
    return _norm(grads)


def _drift(grads: Tree, before: Carry, after: Carry, facts: Facts) -> Tensor:
    return _norm({key: after.params[key] - after.anchor[key] for key in after.params})


def _statistics(state: Tree, facts: Facts, part: str | None = None) -> list[str]:
    """Keys of the running statistics of a state, or of one part of them, such as the means."""
    return [
        entry.key
        for entry in facts.entries.values()
        if entry.kind is Kind.STATISTIC and entry.key in state and part in (None, entry.part)
    ]


def _mean(parts: list[Tensor]) -> Tensor:
    """Over all channels of all layers; 0 for a model without."""
    return torch.cat([part.flatten() for part in parts]).mean() if parts else torch.zeros(())


def _running_mean(grads: Tree, before: Carry, after: Carry, facts: Facts) -> Tensor:
    return _mean([after.state[key] for key in _statistics(after.state, facts, "running_mean")])


def _running_var(grads: Tree, before: Carry, after: Carry, facts: Facts) -> Tensor:
    return _mean([after.state[key] for key in _statistics(after.state, facts, "running_var")])


@dataclass(frozen=True)
class Shift:
    """The mean over channels of |running statistics after a client's work - those it began with|: FixBN's D."""

    part: str | None = None

    def __call__(self, seen: Tensor | None, end: Tree, start: Tree, facts: Facts) -> Tensor:
        return _mean([(end[key] - start[key]).abs() for key in _statistics(end, facts, self.part)])


def _of_batches(state: Tree, facts: Facts) -> list[tuple[str, float]]:
    """Keys of statistics that are moving averages, and the share of a batch's in them."""
    keys = _statistics(state, facts)
    return [(key, facts.momenta[layer]) for key in keys if (layer := facts.entries[key].layer) in facts.momenta]


def _batch_statistics(grads: Tree, before: Carry, after: Carry, facts: Facts) -> Tensor:
    """Means and variances of the last batch, from what they did to the running ones."""
    new, old = after.state, before.state
    parts = [(new[key] - (1 - rate) * old[key]) / rate for key, rate in _of_batches(new, facts)]
    return torch.cat([part.flatten() for part in parts]) if parts else torch.zeros(0)


def _batch_shift(seen: Tensor | None, end: Tree, start: Tree, facts: Facts) -> Tensor:
    keys = [key for key, _ in _of_batches(end, facts)]
    if seen is None or not keys:
        return torch.zeros(())
    return (seen - torch.cat([start[key].flatten() for key in keys])).abs().mean()


def _global_shift(merged: Merged) -> Tensor:
    return _mean([(merged.after - merged.before).abs()]) if len(merged.after) else torch.zeros(())


def _client_spread(merged: Merged) -> Tensor:
    return merged.variance.mean() if len(merged.variance) else torch.zeros(())


PROBES = {
    probe.name: probe
    for probe in (
        Probe("grad-norm", "L2 norm of the gradient after all transforms", _grad_norm),
        Probe("drift", "L2 distance of the parameters from those the server sent", _drift),
        Probe("running-mean", "mean of the running means over all batch-norm channels", _running_mean),
        Probe("running-var", "mean of the running variances over all batch-norm channels", _running_var),
        Probe("statistics-shift", "mean |running statistics after a client's work - before it|", tell=Shift()),
        Probe("mean-shift", "the same of the running means alone", tell=Shift("running_mean")),
        Probe("var-shift", "the same of the running variances alone", tell=Shift("running_var")),
        Probe(
            "batch-shift",
            "mean |statistics of a client's last batch - running ones it began with|",
            _batch_statistics,
            _batch_shift,
        ),
        Probe("global-shift", "mean |the server's running statistics after a merge - before it|", join=_global_shift),
        Probe(
            "client-spread",
            "variance of running statistics over clients, mean over channels",
            join=_client_spread,
        ),
    )
}
"""What they mean: of FixBN's Figure 3, (a) shows `global-shift` and `batch-shift`, (b) the variance of the latter over
a window of rounds (`running.probe_curves`)."""


def find_probes(names: tuple[str, ...]) -> tuple[Probe, ...]:
    """Probes by name."""
    for name in names:
        if name not in PROBES:
            raise unknown("probe", name, PROBES)
    return tuple(PROBES[name] for name in names)
