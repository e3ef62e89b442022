"""Adam and AdamW over a stack of clients as one operator, by name, with its reference in plain torch.

As in `fednorm.engines.stack.kernels.ops`, the Triton kernel runs where it fits, the reference elsewhere.
"""
# torch.library reads the annotations of an operator, so this file does without `from __future__ import annotations`.

import torch
from torch import Tensor

from fednorm.core.optimizers import AdamUpdate
from fednorm.engines.stack.kernels.element_ops import side_by_side
from fednorm.engines.stack.kernels.ops import kernels_fit
from fednorm.engines.stack.row_matrix import aligned_like

Moved = tuple[Tensor, Tensor, Tensor, Tensor]
"""Values, first and second moments, and counts of steps, each (client, number)."""


@torch.library.custom_op("fednorm::adam", mutates_args=())
def adam(
    value: Tensor, grads: list[Tensor], first: Tensor, second: Tensor, count: Tensor, lr: Tensor, decay: Tensor,
    beta1: float, beta2: float, eps: float, decoupled: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Values, moments and counts after a step; gradients lie side by side, rate and decay are per client.

    A gradient is (client, number), or (client, part, number) where parts are still to be added.
    """
    old = value, first, second, count
    new = aligned_like(value), aligned_like(first), aligned_like(second), aligned_like(count)
    _adam_into(old, grads, new, lr, decay, AdamUpdate(beta1, beta2, eps, decoupled))
    return new


@adam.register_fake
def _(
    value: Tensor, grads: list[Tensor], first: Tensor, second: Tensor, count: Tensor, lr: Tensor, decay: Tensor,
    beta1: float, beta2: float, eps: float, decoupled: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return aligned_like(value), aligned_like(first), aligned_like(second), aligned_like(count)


@torch.library.custom_op("fednorm::adam_in_place", mutates_args=("value", "first", "second", "count", "rounded"))
def adam_in_place(
    value: Tensor, grads: list[Tensor], first: Tensor, second: Tensor, count: Tensor, lr: Tensor, decay: Tensor,
    beta1: float, beta2: float, eps: float, decoupled: bool, rounded: Tensor | None,
) -> None:  # fmt: skip
    """The same, written over the old values, moments and counts; the values in a narrow type as well."""
    old = value, first, second, count
    _adam_into(old, grads, old, lr, decay, AdamUpdate(beta1, beta2, eps, decoupled), rounded)


def _adam_into(
    old: Moved, grads: list[Tensor], new: Moved, lr: Tensor, decay: Tensor, update: AdamUpdate,
    rounded: Tensor | None = None,
) -> None:  # fmt: skip
    if kernels_fit(old[0]):
        from fednorm.engines.stack.kernels.adam import run_adam

        run_adam(old, grads, new, lr.contiguous(), decay.contiguous(), update, rounded)
        return
    held = {"exp_avg": old[1], "exp_avg_sq": old[2], "step": old[3]}
    numbers = {"lr": lr[:, None], "weight_decay": decay[:, None]}
    value, kept = update(old[0], side_by_side(grads), held, numbers)
    for place, moved in zip(new, (value, *kept.values()), strict=True):
        place.copy_(moved)
    if rounded is not None:
        rounded.copy_(value)
