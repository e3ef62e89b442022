"""The loss of a stack of clients as one operator: torch's some twenty small launches take longer than a layer."""

# The vmap rules name their arguments, where torch's base class has *args; applying a Function has no useful type.
# pyright: reportIncompatibleMethodOverride=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fednorm.engines.stack.kernels import loss_ops
from fednorm.engines.stack.kernels.mapped import stacked
from fednorm.engines.stack.kernels.tiles import power_of_2

_MOST = 1 << 16
"""Scores of a client's batch: of more, launches are not what takes the time."""


class CrossEntropy(torch.autograd.Function):
    """A mean loss, and the gradient that was computed with it, which may be differentiated as well."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
        loss, grad = loss_ops.cross_entropy(x.unsqueeze(0), y.unsqueeze(0), ignored)
        return loss[0], grad[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, y, ctx.ignored = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y, output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        (x, y, away), (first, second) = ctx.saved_tensors, grads
        dx = None if first is None else away * first
        if second is not None:  # of the gradient itself, where a loss depends on it
            known, share = (y != ctx.ignored).unsqueeze(1), torch.softmax(x, 1)
            turned = share * second * known / known.sum()
            moved = turned - share * turned.sum(1, keepdim=True)
            dx = moved if dx is None else dx + moved
        return dx, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, y: Tensor, ignored: int) -> Any:
        return loss_ops.cross_entropy(*stacked(info, in_dims, x, y), ignored), (0, 0)


class LossesOfStacks(TorchFunctionMode):
    """Inside it `functional.cross_entropy` of classes is the operator, whoever calls it, where it can be."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        return func(*args, **kwargs)


def _cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
    ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    plain = weight is None and size_average is None and reduce is None and reduction == "mean" and not label_smoothing
    if plain and _fits(input, target):
        loss: Any = CrossEntropy.apply(input, target, ignore_index)
        return loss[0]
    return functional.cross_entropy(
        input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
    )


def _fits(scores: Tensor, labels: Tensor) -> bool:
    """Whether these are scores of classes for each example of a batch, as wide as losses are, and their labels."""
    classes = scores.dim() == 2 and labels.dim() == 1 and labels.dtype == torch.int64
    return (
        classes
        and len(scores) == len(labels)
        and scores.dtype in (torch.float32, torch.float64)
        and len(scores) * power_of_2(scores.shape[1]) <= _MOST
    )
