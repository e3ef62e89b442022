"""One primitive for clients in lock-step, the mean over the cohort, and the BatchNorm of FedTAN built on it.

Run all clients of a cohort under one `torch.vmap`: then the clients are the mapped axis, and a mean over it is all
that FedTAN's 3 exchanges a layer compute (Wang, Shi, Chang 2023, arXiv 2301.02982).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fednorm.layers.batch_stats import RunningNorm, normalise, scale_and_shift, unbiased
from fednorm.layers.swapping import SwapByClass


class _CohortMean(torch.autograd.Function):
    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return cohort_mean(grad_outputs[0], weight), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, int | None], *args: Tensor) -> tuple[Tensor, None]:
        x, weight = args
        x_dim, weight_dim = in_dims
        if x_dim is None:
            return x.clone(), None
        x = x.movedim(x_dim, 0)
        if weight_dim is None:
            return x.mean(0), None
        shares = weight.to(x.dtype) / weight.to(x.dtype).sum()
        return torch.tensordot(shares, x, dims=1), None


class _CohortCount(torch.autograd.Function):
    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return torch.ones((), dtype=x.dtype, device=x.device)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, None]:
        return None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, int | None], *args: Tensor) -> tuple[Tensor, None]:
        x, weight = args
        if in_dims[1] is not None:
            return (weight > 0).sum().to(x.dtype), None
        return torch.full((), info.batch_size, dtype=x.dtype, device=x.device), None


def cohort_mean(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """The weighted mean of x over the clients, which are the axis of the innermost `torch.vmap` around it.

    Forward: sum_k p_k x_k with p_k = w_k / sum w; backward: the same mean of the gradient, so that the p-weighted
    average of the clients' gradients is the gradient of their p-weighted average loss. Outside `torch.vmap` the cohort
    is one client and this is the identity.

    >>> torch.vmap(cohort_mean)(torch.tensor([1.0, 2.0, 6.0]))
    tensor([3., 3., 3.])
    """
    return _CohortMean.apply(x, x.new_ones(()) if weight is None else weight)  # pyright: ignore[reportReturnType]


class CohortBN(RunningNorm):
    """BatchNorm over the union of the clients' batches while `lockstep` is on, else BatchNorm of the own batch.

    `share` is the client's weight in the cohort (its batch size, or 0 for a client that only fills the stack); all
    equal unless `functional_call` overrides it. The running variance gets n / (n - 1), n the size of the union.
    """

    share: Tensor

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True) -> None:
        super().__init__(num_features, eps=eps, momentum=momentum, affine=affine)
        self.register_buffer("share", torch.ones(()), persistent=False)
        self.lockstep = False

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training and self.lockstep):
            return super().forward(input)
        self._check_input_dim(input)
        axes = [0, *range(2, input.dim())]
        own = input.mean(axes)
        mean = cohort_mean(own, self.share)
        # Around the mean of the union: the variance of the client's own batch would miss the spread of the clients.
        square = (input - mean.reshape(1, -1, *[1] * (input.dim() - 2))).square()
        var = cohort_mean(square.mean(axes), self.share)
        clients: Tensor = _CohortCount.apply(own.detach(), self.share)  # pyright: ignore[reportAssignmentType]
        self.track(mean, unbiased(var.detach(), clients * (input.numel() // self.num_features)))
        return scale_and_shift(normalise(input, mean, var, self.eps), self.weight, self.bias)


@dataclass(frozen=True)
class ToCohortBN(SwapByClass):
    """BatchNorm becomes CohortBN; nothing is lost."""

    layer = CohortBN


def set_lockstep(model: nn.Module, lockstep: bool) -> None:
    """Let all CohortBN layers use the union of the batches, or their own again."""
    for module in model.modules():
        if isinstance(module, CohortBN):
            module.lockstep = lockstep


def share_names(model: nn.Module) -> list[str]:
    """Names of the buffers that hold a client's weight in the cohort, to override in `functional_call`."""
    return [
        f"{name}.share" if name else "share" for name, module in model.named_modules() if isinstance(module, CohortBN)
    ]
