"""BatchNorms that train on statistics the server holds: Federated BatchNorm and Hybrid BatchNorm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from fednorm.core.state import register_norm
from fednorm.layers.batch_stats import RecordingNorm, moments, normalise, scale_and_shift
from fednorm.layers.swapping import SwapByClass

_KINDS = {
    "weight": "affine",
    "bias": "affine",
    "running_mean": "statistic",
    "running_var": "statistic",
    "num_batches_tracked": "counter",
    # Of the same kind as the running ones, since the server folds them into these, a layer at a time.
    "batch_mean": "statistic",
    "batch_var": "statistic",
    "batch_count": "statistic",
}


class FederatedBN(RecordingNorm):
    """Normalises with the shared statistics in training too, and reports the moments of its batches.

    No gradient flows through the statistics (Guerraoui et al. 2024, arXiv 2405.14670).
    """

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if self.training:
            self.record(*moments(input))
        return self.use_running(input)


class HybridBN(RecordingNorm):
    """Normalises with a mixture of the shared and the batch's statistics, learned for each channel.

    mean = (1 - a) * shared + a * batch, the same for the variance, a = sigmoid(factor), factor from 0; evaluation uses
    the shared ones alone (Chen et al., ICML 2025). Gradients flow through the batch's part and the factor. What it
    records for the server is the mixture, as the authors' code does, or the batch's own moments.
    """

    records: Literal["mixture", "batch"] = "mixture"

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True) -> None:
        super().__init__(num_features, eps=eps, momentum=momentum, affine=affine)
        self.factor = nn.Parameter(torch.zeros(num_features))

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training:
            return self.use_running(input)
        batch_mean, batch_var = moments(input)
        own = torch.sigmoid(self.factor)
        mean = (1 - own) * self.running_mean + own * batch_mean
        var = (1 - own) * self.running_var + own * batch_var
        self.record(*((mean, var) if self.records == "mixture" else (batch_mean, batch_var)))
        return scale_and_shift(normalise(input, mean, var, self.eps), self.weight, self.bias)


register_norm(FederatedBN, **_KINDS)
register_norm(HybridBN, **_KINDS, factor="extra")


@dataclass(frozen=True)
class ToFederatedBN(SwapByClass):
    """BatchNorm becomes FederatedBN; its running statistics start as the shared ones."""

    layer = FederatedBN


@dataclass(frozen=True)
class ToHybridBN(SwapByClass):
    """BatchNorm becomes HybridBN; its running statistics start as the shared ones."""

    layer = HybridBN
    records: Literal["mixture", "batch"] = "mixture"

    def make(self, name: str, old: _BatchNorm) -> nn.Module:
        new = HybridBN.like(old)
        new.records = self.records
        return new
