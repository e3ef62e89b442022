"""Weights of the clients in a merge: pure functions of what the clients report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fednorm.core.reductions import fold, wide, wide_device


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


@dataclass(frozen=True)
class Reports:
    """The reports of a cohort as float64 vectors over its clients, ascending by client id."""

    num_examples: Tensor
    losses: Mapping[str, Tensor] = field(default_factory=dict)
    scalars: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, reports: Sequence[Report], device: torch.device | str = "cpu") -> Reports:
        """The vectors of some clients' reports, with the losses and scalars that all of them have.

        >>> Reports.of([Report(0, 3, {"all": 1.5}), Report(1, 5, {"all": 0.5, "last_batch": 0.25})]).losses
        {'all': tensor([1.5000, 0.5000], dtype=torch.float64)}
        """
        place = wide_device(torch.device(device))

        def vector(values: Iterable[float]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.float64, device=place)

        def vectors(each: Sequence[Mapping[str, float]]) -> dict[str, Tensor]:
            common = [name for name in each[0] if all(name in one for one in each)] if each else []
            return {name: vector(one[name] for one in each) for name in common}

        return cls(
            vector(report.num_examples for report in reports),
            vectors([report.losses for report in reports]),
            vectors([report.scalars for report in reports]),
        )


Layers = Mapping[str, Mapping[str, Tensor]]
"""What the clients send of one kind: by layer, then by part, each tensor with a leading client axis."""

Weigh = Callable[[Reports, Layers], Tensor]
"""(reports, what the clients send of the kind) -> the clients' weights, float64 with sum 1.

As in a merge, no value is asked for: a choice is a `torch.where`.
"""


def normalised(values: Tensor) -> Tensor:
    """A vector scaled to sum 1.

    >>> normalised(torch.tensor([1.0, 3.0]))
    tensor([0.2500, 0.7500])
    """
    # A running sum goes left to right on the host, alone or mapped over runs, where `sum` may take another order.
    total = values.cumsum(0)[-1] if values.device.type == "cpu" else values.sum()
    return values / total


def by_size(reports: Reports, layers: Layers | None = None) -> Tensor:
    """p_k = n_k / sum of n over the participants (McMahan et al. 2017)."""
    return normalised(reports.num_examples)


def uniform(reports: Reports, layers: Layers | None = None) -> Tensor:
    """p_k = 1 / number of participants."""
    return torch.full_like(reports.num_examples, 1 / len(reports.num_examples))


def by_loss(which: str = "last_epoch") -> Weigh:
    """p_k = F_k / sum of F over the participants (FedBS); uniform where a loss is not positive and finite."""

    def weigh(reports: Reports, layers: Layers | None = None) -> Tensor:
        losses = reports.losses[which]
        usable = (losses.isfinite() & (losses > 0)).all()
        return torch.where(usable, normalised(losses), uniform(reports))

    return weigh


def by_divergence(tau: float) -> Weigh:
    """p_k proportional to exp(-D_k / tau), D_k how far client k's statistics are from the clients' pool.

    D_k is the Kullback-Leibler divergence of the client's Gaussian from the pooled one, mean over all channels.
    """

    def weigh(reports: Reports, layers: Layers) -> Tensor:
        sizes = by_size(reports)
        total = torch.zeros_like(sizes)
        channels = 0
        for layer in layers.values():
            mean, var = _moments(layer)
            centre = fold(mean, sizes)
            pool = fold(var + (mean - centre).square(), sizes)
            ratio = (var + _TINY) / (pool + _TINY)
            total = total + 0.5 * (ratio + (mean - centre).square() / (pool + _TINY) - 1 - ratio.log()).sum(1)
            channels += mean.shape[1]
        return torch.softmax(-total / channels / tau, 0) if channels else sizes

    return weigh


def _moments(layer: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Clients' means and variances of a layer, a row each; the layer may hold a standard deviation."""
    parts = {part: wide(value).flatten(1) for part, value in layer.items()}
    return parts["running_mean"], parts["running_var"] if "running_var" in parts else parts["running_std"].square()


_TINY = 1e-5  # the eps of batch norm: a channel that is constant everywhere must not divide by zero
