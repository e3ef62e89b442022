"""Probes: named pure functions of one client's step, recorded without changing the result."""

from __future__ import annotations

import torch
from torch import Tensor

from fednorm.core.method import Facts
from fednorm.core.state import Kind, Tree
from fednorm.core.step import Carry, Probe
from fednorm.errors import unknown


def _norm(tree: Tree) -> Tensor:
    return torch.sqrt(torch.stack([value.square().sum() for value in tree.values()]).sum())


def _grad_norm(grads: Tree, before: Carry, after: Carry, facts: Facts) -> Tensor:
    return _norm(grads)


def _drift(grads: Tree, before: Carry, after: Carry, facts: Facts) -> Tensor:
    return _norm({key: after.params[key] - after.anchor[key] for key in after.params})


def _mean_of(state: Tree, facts: Facts, part: str) -> Tensor:
    chosen = [
        value.flatten()
        for key, value in state.items()
        if key in facts.entries and facts.entries[key].kind is Kind.STATISTIC and facts.entries[key].part == part
    ]
    return torch.cat(chosen).mean() if chosen else torch.zeros(())


def _running_mean(grads: Tree, before: Carry, after: Carry, facts: Facts) -> Tensor:
    return _mean_of(after.state, facts, "running_mean")


def _running_var(grads: Tree, before: Carry, after: Carry, facts: Facts) -> Tensor:
    return _mean_of(after.state, facts, "running_var")


PROBES = {
    probe.name: probe
    for probe in (
        Probe("grad-norm", "L2 norm of the gradient after all transforms", _grad_norm),
        Probe("drift", "L2 distance of the parameters from those the server sent", _drift),
        Probe("running-mean", "mean of the running means over all batch-norm channels", _running_mean),
        Probe("running-var", "mean of the running variances over all batch-norm channels", _running_var),
    )
}


def find_probes(names: tuple[str, ...]) -> tuple[Probe, ...]:
    """Probes by name."""
    for name in names:
        if name not in PROBES:
            raise unknown("probe", name, PROBES)
    return tuple(PROBES[name] for name in names)
