"""A Triton kernel of Adam and AdamW: one pass over values, gradients, moments and counts."""
# Triton reads annotations of constants at run time, so this file does without `from __future__ import annotations`.

from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from fednorm.core.optimizers import AdamUpdate
from fednorm.engines.stack.kernels.gradients import BLOCK, gradient_of, shares, summed
from fednorm.engines.stack.kernels.launch import kernel


@triton.jit
def _bias(log_beta, count):
    """1 - beta**count, the power rounded once, as torch does: a quick one is off by much of what is left of 1."""
    return 1 - tl.exp(count.to(tl.float64) * log_beta).to(tl.float32)


@kernel()
def _adam_kernel(
    value_ptr, first_ptr, second_ptr, count_ptr, new_ptr, new_first_ptr, new_second_ptr, new_count_ptr, rounded_ptr,
    sources, place_ptr, grad_stride, numbers, parts, lr_ptr, decay_ptr, value_stride, first_stride, second_stride,
    count_stride, new_stride, new_first_stride, new_second_stride, new_count_stride, rounded_stride,
    beta1, rest1, log_beta1, beta2, rest2, log_beta2, eps,
    DECOUPLED: tl.constexpr, ROUNDED: tl.constexpr, LISTED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1)
    row = client.to(tl.int64)
    at, inside, grad_ptr, numbers, parts = gradient_of(
        sources, place_ptr, row, grad_stride, numbers, parts, LISTED, LANES
    )
    grad = summed(grad_ptr, inside, numbers, parts, LANES)
    lr, decay = tl.load(lr_ptr + client), tl.load(decay_ptr + client)
    value = tl.load(value_ptr + row * value_stride + at, mask=inside, other=0.0)
    if DECOUPLED:
        value = value * (1 - lr * decay)
    else:
        grad = grad + decay * value
    first = beta1 * tl.load(first_ptr + row * first_stride + at, mask=inside, other=0.0) + rest1 * grad
    second = beta2 * tl.load(second_ptr + row * second_stride + at, mask=inside, other=0.0) + rest2 * (grad * grad)
    count = tl.load(count_ptr + row * count_stride + at, mask=inside, other=0.0) + 1
    away = lr / _bias(log_beta1, count) * first / (tl.sqrt_rn(second) / tl.sqrt_rn(_bias(log_beta2, count)) + eps)
    value -= away
    tl.store(new_ptr + row * new_stride + at, value, mask=inside)
    if ROUNDED:
        tl.store(rounded_ptr + row * rounded_stride + at, value.to(rounded_ptr.dtype.element_ty), mask=inside)
    tl.store(new_first_ptr + row * new_first_stride + at, first, mask=inside)
    tl.store(new_second_ptr + row * new_second_stride + at, second, mask=inside)
    tl.store(new_count_ptr + row * new_count_stride + at, count, mask=inside)


def run_adam(
    old: tuple[Tensor, ...], grads: list[Tensor], new: tuple[Tensor, ...], lr: Tensor, decay: Tensor,
    update: AdamUpdate, rounded: Tensor | None = None,
) -> None:  # fmt: skip
    """Write values, both moments and counts, (client, number) each; `new` may be `old`. Gradients lie side by side.

    The values are written in a narrow type as well where there is `rounded` for it. The gradients are (client, number),
    or (client, part, number) where parts are still to be added.
    """
    firsts = accumulate((grad.shape[-1] for grad in grads[:-1]), initial=0)
    for share in shares(zip(firsts, grads, strict=True)):
        each = [(old[0] if part is None else part)[:, share.numbers] for part in (*old, *new, rounded)]
        _adam_kernel[(share.blocks, len(lr))](
            *each, *share.read, lr, decay, *(part.stride(0) for part in each),
            *_factors(update.beta1), *_factors(update.beta2), update.eps,
            DECOUPLED=update.decoupled, ROUNDED=rounded is not None, LISTED=share.places is not None,
            LANES=BLOCK, num_warps=4,
        )  # fmt: skip


def _factors(beta: float) -> tuple[float, float, float]:
    """A beta, what is left of 1, and its logarithm, where it is as narrow as the numbers that torch takes powers of."""
    return beta, 1 - beta, float(torch.tensor(beta, dtype=torch.float32).double().log())
