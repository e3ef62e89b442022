"""Weights of the clients in a merge that follow from their losses, or from what they send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fednorm.core.reductions import fold, wide
from fednorm.core.report import BySize, Layers, Reports, Uniform, normalised


@dataclass(frozen=True)
class ByLoss:
    """p_k = F_k / sum of F over the participants (FedBS); uniform where a loss is not positive and finite."""

    which: str = "last_epoch"

    def __call__(self, reports: Reports, layers: Layers | None = None) -> Tensor:
        losses = reports.losses[self.which]
        usable = (losses.isfinite() & (losses > 0)).all()
        return torch.where(usable, normalised(losses), Uniform()(reports))


@dataclass(frozen=True)
class ByDivergence:
    """p_k proportional to exp(-D_k / tau), D_k how far client k's statistics are from the clients' pool.

    D_k is the Kullback-Leibler divergence of the client's Gaussian from the pooled one, mean over all channels.
    """

    tau: float

    def __call__(self, reports: Reports, layers: Layers) -> Tensor:
        sizes = BySize()(reports)
        total = torch.zeros_like(sizes)
        channels = 0
        for layer in layers.values():
            mean, var = _moments(layer)
            centre = fold(mean, sizes)
            pool = fold(var + (mean - centre).square(), sizes)
            ratio = (var + _TINY) / (pool + _TINY)
            total = total + 0.5 * (ratio + (mean - centre).square() / (pool + _TINY) - 1 - ratio.log()).sum(1)
            channels += mean.shape[1]
        return torch.softmax(-total / channels / self.tau, 0) if channels else sizes


def _moments(layer: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Clients' means and variances of a layer, a row each; the layer may hold a standard deviation."""
    parts = {part: wide(value).flatten(1) for part, value in layer.items()}
    return parts["running_mean"], parts["running_var"] if "running_var" in parts else parts["running_std"].square()


_TINY = 1e-5  # the eps of batch norm: a channel that is constant everywhere must not divide by zero
