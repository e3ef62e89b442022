"""What the layers share that normalise with statistics of a batch, of a running average, or of a mixture."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]


def per_channel(values: Tensor, x: Tensor) -> Tensor:
    """Shape (C,) values so that they act on the channels of x (N, C, ...)."""
    return values.reshape(1, -1, *[1] * (x.dim() - 2))


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel of x (N, C, ...)."""
    axes = [0, *range(2, x.dim())]
    return x.mean(axes), x.var(axes, correction=0)


def normalise(x: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps), channel by channel."""
    return (x - per_channel(mean, x)) * per_channel((var + eps).rsqrt(), x)


def scale_and_shift(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """gamma * x + beta, where the layer has them."""
    if weight is not None:
        x = x * per_channel(weight, x)
    return x if bias is None else x + per_channel(bias, x)


def unbiased(var: Tensor, count: int | Tensor) -> Tensor:
    """The factor n / (n - 1) that torch applies to the variance it stores, but not to the one it divides by."""
    return var * (count / (count - 1))


class RunningNorm(_BatchNorm):
    """BatchNorm for inputs (N, C, ...) of any rank: base of the layers that choose their own statistics.

    Being a torch BatchNorm by type, it has the kinds, the tensors and the freezing of one.
    """

    # Always present here: these layers exist for the sake of their running statistics.
    running_mean: Tensor  # pyright: ignore[reportIncompatibleVariableOverride]
    running_var: Tensor  # pyright: ignore[reportIncompatibleVariableOverride]
    num_batches_tracked: Tensor  # pyright: ignore[reportIncompatibleVariableOverride]

    @classmethod
    def like(cls, old: _BatchNorm) -> Self:
        """A layer with the old one's channels, eps, momentum and affine."""
        return cls(old.num_features, eps=old.eps, momentum=old.momentum, affine=old.affine)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input (N, C, ...), got {input.dim()} axes")

    def track(self, mean: Tensor, var: Tensor) -> None:
        """Move the running statistics towards (mean, var); `momentum=None` makes them the mean over all batches."""
        self.num_batches_tracked.add_(1)
        step = 1 / self.num_batches_tracked.to(mean.dtype) if self.momentum is None else self.momentum
        for running, fresh in ((self.running_mean, mean), (self.running_var, var)):
            running.add_(step * (fresh.detach() - running))

    def use_running(self, x: Tensor) -> Tensor:
        """Normalise with the running statistics; no gradient flows through them."""
        return functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
        )


class RecordingNorm(RunningNorm):
    """A layer that also pools the moments of the batches it sees, for the server to merge.

    `batch_mean` and `batch_var` are the moments of all batches since `batch_count` was 0 (law of total variance, equal
    batches): what a client reports and the server folds into the shared running statistics.
    """

    batch_mean: Tensor
    batch_var: Tensor
    batch_count: Tensor

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True) -> None:
        super().__init__(num_features, eps=eps, momentum=momentum, affine=affine)
        self.register_buffer("batch_mean", torch.zeros(num_features))
        self.register_buffer("batch_var", torch.zeros(num_features))
        self.register_buffer("batch_count", torch.zeros(()))

    def record(self, mean: Tensor, var: Tensor) -> None:
        self.batch_count.add_(1)
        part = 1 / self.batch_count
        away = mean.detach() - self.batch_mean
        self.batch_mean.add_(part * away)
        self.batch_var.add_(part * (var.detach() - self.batch_var) + part * (1 - part) * away.square())
