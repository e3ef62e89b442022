"""Weights of the clients in a merge: pure functions of what the clients report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fednorm.state import Tree


@dataclass(frozen=True)
class Report:
    """The numbers a client sends beside its tensors."""

    client: int
    num_examples: int
    losses: Mapping[str, float] = field(default_factory=dict)
    """Mean training loss without penalty terms, over `all` steps, the `last_epoch` and the `last_batch`."""
    scalars: Mapping[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """The mean training loss over the last local epoch."""
        return self.losses.get("last_epoch", math.nan)


def loss_summary(losses: Sequence[float], steps_per_epoch: int) -> dict[str, float]:
    """The losses of a client's steps as the three means a report carries.

    >>> loss_summary([4.0, 2.0, 1.0], steps_per_epoch=2)
    {'all': 2.3333333333333335, 'last_epoch': 1.5, 'last_batch': 1.0}
    """
    last = losses[-steps_per_epoch:]
    return {
        "all": math.fsum(losses) / len(losses),
        "last_epoch": math.fsum(last) / len(last),
        "last_batch": losses[-1],
    }


Layers = Mapping[str, Tree]
"""What a client sends of one kind: by layer, then by part."""

Weigh = Callable[[Sequence[Report], Sequence[Layers]], list[float]]
"""(reports, what the clients send of the kind) -> the clients' weights, in the same order, with sum 1."""


def normalised(values: Sequence[float]) -> list[float]:
    """Values scaled to sum 1.

    >>> normalised([1, 3])
    [0.25, 0.75]
    """
    total = math.fsum(values)
    return [value / total for value in values]


def by_size(reports: Sequence[Report], layers: Sequence[Layers] = ()) -> list[float]:
    """p_k = n_k / sum of n over the participants (McMahan et al. 2017)."""
    return normalised([report.num_examples for report in reports])


def uniform(reports: Sequence[Report], layers: Sequence[Layers] = ()) -> list[float]:
    """p_k = 1 / number of participants."""
    return [1 / len(reports)] * len(reports)


def by_loss(which: str = "last_epoch") -> Weigh:
    """p_k = F_k / sum of F over the participants (FedBS); uniform where a loss is not positive and finite."""

    def weigh(reports: Sequence[Report], layers: Sequence[Layers] = ()) -> list[float]:
        losses = [report.losses[which] for report in reports]
        usable = all(math.isfinite(loss) and loss > 0 for loss in losses)
        return normalised(losses) if usable else uniform(reports)

    return weigh


def by_divergence(tau: float) -> Weigh:
    """p_k proportional to exp(-D_k / tau), D_k how far client k's statistics are from the clients' pool.

    D_k is the Kullback-Leibler divergence of the client's Gaussian from the pooled one, mean over all channels.
    """

    def weigh(reports: Sequence[Report], layers: Sequence[Layers]) -> list[float]:
        sizes = by_size(reports)
        total = torch.zeros(len(layers), dtype=torch.float64)
        channels = 0
        for layer in layers[0] if layers else ():
            mean, var = (torch.stack(each) for each in zip(*(_moments(sent[layer]) for sent in layers), strict=True))
            share = torch.tensor(sizes, dtype=torch.float64).unsqueeze(1)
            centre = (share * mean).sum(0)
            pool = (share * (var + (mean - centre).square())).sum(0)
            ratio = (var + _TINY) / (pool + _TINY)
            total += 0.5 * (ratio + (mean - centre).square() / (pool + _TINY) - 1 - ratio.log()).sum(1)
            channels += mean.shape[1]
        if not channels:
            return sizes
        return torch.softmax(-total / channels / tau, 0).tolist()

    return weigh


def _moments(layer: Tree) -> tuple[Tensor, Tensor]:
    """Mean and variance of a layer's statistics, which may hold a standard deviation."""
    parts = {part: value.double().cpu() for part, value in layer.items()}
    return parts["running_mean"], parts["running_var"] if "running_var" in parts else parts["running_std"].square()


_TINY = 1e-5  # the eps of batch norm: a channel that is constant everywhere must not divide by zero
