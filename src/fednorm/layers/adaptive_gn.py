"""The adaptive group norm of FedNN: each layer learns whether to normalise as a group norm or as a batch norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from fednorm.core import rng
from fednorm.core.state import register_norm
from fednorm.core.surgery import SurgeryReport
from fednorm.layers.batch_stats import moments, per_channel, scale_and_shift
from fednorm.layers.keyed import Keyed, number_keyed_layers
from fednorm.layers.scheduled import Scheduled
from fednorm.layers.swapping import SwapNorm, largest_divisor

_START, _END = 5.0, 1e-3


class AdaptiveGroupNorm(Keyed, Scheduled):
    """Normalises with w_1 * (group statistics) + w_2 * (batch statistics), as FedNN does (Kang et al. 2024).

    w = softmax((logits + g) / tau), g keyed Gumbel noise (a Gumbel-softmax). The temperature falls linearly from 5 with
    the global step, read from `num_batches_tracked`; once a draw is one-hot it is latched: `choice` holds it, and noise
    and logits no longer matter. Evaluation uses the latched choice, or softmax(logits / tau) before there is one, and
    running for batch statistics.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    choice: Tensor
    latched: Tensor

    def __init__(
        self, groups: int, num_features: int, *, momentum: float = 0.003, eps: float = 1e-5, affine: bool = True
    ) -> None:
        super().__init__()
        self.groups, self.momentum, self.eps = groups, momentum, eps
        self.register_parameter("weight", nn.Parameter(torch.ones(num_features)) if affine else None)
        self.register_parameter("bias", nn.Parameter(torch.zeros(num_features)) if affine else None)
        self.logits = nn.Parameter(torch.ones(2))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))
        self.register_buffer("choice", torch.full((2,), 0.5))
        self.register_buffer("latched", torch.zeros((), dtype=torch.int64))
        self.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.int64))

    def tau(self) -> Tensor:
        """The temperature of this step."""
        over = self.done(self.num_batches_tracked, self.logits.dtype)
        return (_START * (1 - over)).clamp_min(_END)

    def _draw(self) -> Tensor:
        uniform = rng.uniform(self.next_key(), (2,)).clamp_min(2.0**-25)  # 0 would make the noise infinite
        noise = -torch.log(-torch.log(uniform.to(self.logits.dtype)))
        return torch.softmax((self.logits + noise) / self.tau(), 0)

    def mixture(self) -> Tensor:
        """The weights of group and batch statistics in this call; in training this draws, and may latch."""
        latched = self.latched > 0
        if not self.training:
            return torch.where(latched, self.choice, torch.softmax(self.logits / self.tau(), 0))
        drawn = self._draw()
        weights = torch.where(latched, self.choice.clone(), drawn)
        one_hot = (weights.detach().max() >= 1).to(self.latched.dtype)
        self.choice.copy_(weights.detach())
        self.latched.copy_(torch.maximum(self.latched, one_hot))
        return weights

    def forward(self, x: Tensor) -> Tensor:
        grouped = x.reshape(x.shape[0], self.groups, -1)
        group_mean, group_var = grouped.mean(-1), grouped.var(-1, correction=0)
        if self.training:
            self.num_batches_tracked.add_(1)
            mean, var = moments(x)
            self.running_mean.add_(self.momentum * (mean.detach() - self.running_mean))
            self.running_var.add_(self.momentum * (var.detach() - self.running_var))
        else:
            mean, var = self.running_mean, self.running_var
        weights = self.mixture()
        mean = weights[0] * self._spread(group_mean, x) + weights[1] * per_channel(mean, x)
        var = weights[0] * self._spread(group_var, x) + weights[1] * per_channel(var, x)
        return scale_and_shift((x - mean) * (var + self.eps).rsqrt(), self.weight, self.bias)

    def _spread(self, of_groups: Tensor, x: Tensor) -> Tensor:
        """(N, G) statistics as (N, C, 1, ...)."""
        spread = of_groups.repeat_interleave(x.shape[1] // self.groups, dim=1)
        return spread.reshape(*spread.shape, *[1] * (x.dim() - 2))


register_norm(
    AdaptiveGroupNorm,
    weight="affine",
    bias="affine",
    logits="weight",
    running_mean="statistic",
    running_var="statistic",
    choice="extra",
    latched="counter",
    num_batches_tracked="counter",
)


@dataclass(frozen=True)
class ToAdaptiveGroupNorm(SwapNorm):
    """BatchNorm becomes AdaptiveGroupNorm (FedNN also standardises its convolutions, style "qiao")."""

    groups: int = 2

    def make(self, name: str, old: _BatchNorm) -> nn.Module:
        fitting = largest_divisor(old.num_features, self.groups)
        return AdaptiveGroupNorm(fitting, old.num_features, eps=old.eps, affine=old.affine)

    def label(self, new: nn.Module) -> str:
        return "AdaptiveGroupNorm"

    def __call__(self, model: nn.Module) -> tuple[nn.Module, SurgeryReport]:
        model, report = super().__call__(model)
        number_keyed_layers(model)
        return model, report
