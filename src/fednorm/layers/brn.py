"""Batch renormalization: BatchNorm whose training output leans on the running statistics (Ioffe 2017)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from fednorm.core.state import register_norm
from fednorm.errors import ConfigError
from fednorm.layers.batch_stats import moments, per_channel, scale_and_shift
from fednorm.layers.scheduled import Scheduled
from fednorm.layers.swapping import SwapNorm


class BatchRenorm(Scheduled):
    """y = gamma * ((x - mu_B) / sigma_B * r + d) + beta on inputs (N, C, ...).

    r = clip(sigma_B / sigma, 1/r_max, r_max) and d = clip((mu_B - mu) / sigma, -d_max, d_max) carry no gradient;
    sigma_B = sqrt(var_B + eps). The running statistics are a mean and a *standard deviation*. Until `warmup` of
    `total_steps` the layer is BatchNorm; then r_max and d_max grow linearly to their ends. The step is read from
    `num_batches_tracked`, which travels with the model, so it counts the steps of the whole training and not of a
    round. The defaults are those of Hsieh et al. 2020 (arXiv 1910.00189) as fractions of their 64,000 steps.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor
    running_std: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        num_features: int,
        *,
        total_steps: int | None = None,
        r_max: float = 4.0,
        d_max: float = 6.0,
        warmup: float = 0.31,
        r_full: float = 0.63,
        d_full: float = 0.47,
        momentum: float = 0.01,
        eps: float = 1e-5,
        affine: bool = True,
    ) -> None:
        super().__init__()
        if r_max < 1 or d_max < 0:
            raise ConfigError(f"batch renormalization needs r_max >= 1 and d_max >= 0; got {r_max} and {d_max}")
        if not 0 <= warmup <= min(r_full, d_full):
            raise ConfigError(
                f"batch renormalization needs 0 <= warmup <= r_full, d_full; got {warmup}, {r_full}, {d_full}"
            )
        self.total_steps, self.warmup, self.r_full, self.d_full = total_steps, warmup, r_full, d_full
        self.r_max, self.d_max, self.momentum, self.eps = r_max, d_max, momentum, eps
        self.register_parameter("weight", nn.Parameter(torch.ones(num_features)) if affine else None)
        self.register_parameter("bias", nn.Parameter(torch.zeros(num_features)) if affine else None)
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_std", torch.ones(num_features))
        self.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.int64))

    def _progress(self, full: float) -> Tensor:
        done = self.done(self.num_batches_tracked, self.running_mean.dtype)
        if full == self.warmup:
            return (done >= full).to(done.dtype)
        return ((done - self.warmup) / (full - self.warmup)).clamp(0, 1)

    def _correction(self, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        r_max = 1 + (self.r_max - 1) * self._progress(self.r_full)
        d_max = self.d_max * self._progress(self.d_full)
        r = torch.minimum(torch.maximum(std / self.running_std, 1 / r_max), r_max)
        d = torch.minimum(torch.maximum((mean - self.running_mean) / self.running_std, -d_max), d_max)
        return r, d

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            hat = (x - per_channel(self.running_mean, x)) / per_channel(self.running_std, x)
            return scale_and_shift(hat, self.weight, self.bias)
        mean, var = moments(x)
        std = (var + self.eps).sqrt()
        r, d = self._correction(mean.detach(), std.detach())
        hat = (x - per_channel(mean, x)) / per_channel(std, x) * per_channel(r, x) + per_channel(d, x)
        self.num_batches_tracked.add_(1)
        self.running_mean.add_(self.momentum * (mean.detach() - self.running_mean))
        self.running_std.add_(self.momentum * (std.detach() - self.running_std))
        return scale_and_shift(hat, self.weight, self.bias)


register_norm(
    BatchRenorm,
    weight="affine",
    bias="affine",
    running_mean="statistic",
    running_std="statistic",
    num_batches_tracked="counter",
)


@dataclass(frozen=True)
class ToBatchRenorm(SwapNorm):
    """BatchNorm becomes BatchRenorm, with the old layer's eps; the fields are the settings of the layer."""

    total_steps: int | None = None
    r_max: float = 4.0
    d_max: float = 6.0
    warmup: float = 0.31
    r_full: float = 0.63
    d_full: float = 0.47
    momentum: float = 0.01

    def make(self, name: str, old: _BatchNorm) -> nn.Module:
        new = BatchRenorm(old.num_features, eps=old.eps, affine=old.affine, **vars(self))
        if old.running_var is not None:
            new.running_std = (old.running_var + new.eps).sqrt()
        return new

    def label(self, new: nn.Module) -> str:
        return "BatchRenorm"
