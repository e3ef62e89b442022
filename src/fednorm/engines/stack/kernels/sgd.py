"""Triton kernels of SGD: one pass over values, gradients and velocities.

The gradient of a large linear layer's weights is not written down: it is a product over the few rows of a batch, taken
where its numbers are used, which spares a layer of millions of weights two of seven passes over them.
"""
# Triton reads annotations of constants at run time, so this file does without `from __future__ import annotations`.

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fednorm.engines.stack.kernels.launch import kernel
from fednorm.engines.stack.kernels.tiles import ALONE, power_of_2

_BLOCK = 1024
_OUTS, _INS = 32, 128
"""Weights of a program: rows long enough to be read in one go."""


@triton.jit
def _stepped(value, grad, velocity, client, lr_ptr, momentum_ptr, decay_ptr, MOMENTUM: tl.constexpr):
    """The new value, and the step it is taken by, which is the new velocity."""
    step = grad + tl.load(decay_ptr + client) * value
    if MOMENTUM:
        step = tl.load(momentum_ptr + client) * velocity + step
    return value - tl.load(lr_ptr + client) * step, step


@kernel()
def _sgd_kernel(
    value_ptr, velocity_ptr, new_ptr, new_velocity_ptr, grad_ptr, lr_ptr, momentum_ptr, decay_ptr,
    value_stride, velocity_stride, new_stride, new_velocity_stride, grad_stride, numbers,
    MOMENTUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1)
    row = client.to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    value = tl.load(value_ptr + row * value_stride + at, mask=inside, other=0.0)
    grad = tl.load(grad_ptr + row * grad_stride + at, mask=inside, other=0.0)
    velocity = tl.load(velocity_ptr + row * velocity_stride + at, mask=inside, other=0.0) if MOMENTUM else 0.0
    value, step = _stepped(value, grad, velocity, client, lr_ptr, momentum_ptr, decay_ptr, MOMENTUM)
    if MOMENTUM:
        tl.store(new_velocity_ptr + row * new_velocity_stride + at, step, mask=inside)
    tl.store(new_ptr + row * new_stride + at, value, mask=inside)


@kernel("rows")
def _sgd_linear_kernel(
    value_ptr, velocity_ptr, new_ptr, new_velocity_ptr, x_ptr, dy_ptr, lr_ptr, momentum_ptr, decay_ptr,
    value_stride, velocity_stride, new_stride, new_velocity_stride, rows, ins, outs,
    MOMENTUM: tl.constexpr, ROWS: tl.constexpr, INS: tl.constexpr, OUTS: tl.constexpr,
):  # fmt: skip
    """The same of weights (out, in), whose gradient is dy^T x."""
    client = tl.program_id(1)
    row = client.to(tl.int64)
    blocks = tl.cdiv(ins, INS)
    out = tl.program_id(0) // blocks * OUTS + tl.arange(0, OUTS)
    taken = tl.program_id(0) % blocks * INS + tl.arange(0, INS)
    grad = tl.zeros((OUTS, INS), dtype=tl.float32)
    for start in range(0, rows, ROWS):
        example = start + tl.arange(0, ROWS)
        known = (example < rows)[:, None]
        dy = tl.load(dy_ptr + (row * rows + example)[:, None] * outs + out[None, :], known & (out < outs)[None, :], 0.0)
        x = tl.load(x_ptr + (row * rows + example)[:, None] * ins + taken[None, :], known & (taken < ins)[None, :], 0.0)
        grad = tl.dot(tl.trans(dy), x, grad, input_precision="ieee")
    at = out[:, None] * ins + taken[None, :]
    inside = (out < outs)[:, None] & (taken < ins)[None, :]
    value = tl.load(value_ptr + row * value_stride + at, mask=inside, other=0.0)
    velocity = tl.load(velocity_ptr + row * velocity_stride + at, mask=inside, other=0.0) if MOMENTUM else 0.0
    value, step = _stepped(value, grad, velocity, client, lr_ptr, momentum_ptr, decay_ptr, MOMENTUM)
    if MOMENTUM:
        tl.store(new_velocity_ptr + row * new_velocity_stride + at, step, mask=inside)
    tl.store(new_ptr + row * new_stride + at, value, mask=inside)


Pair = tuple[Tensor, Tensor | None]


def run_sgd(
    old: Pair, grads: Sequence[Tensor | None], new: Pair, lr: Tensor, momentum: Tensor, decay: Tensor,
    layers: Sequence[tuple[Tensor, Tensor]] = (),
) -> None:  # fmt: skip
    """Write values (client, number) and velocities after a step; `new` may be `old`. The gradients lie side by side.

    One that is None is that of a linear layer's weights: the next of `layers` has its inputs (client, row, in) and the
    gradients of its outputs (client, row, out), contiguous.
    """
    has_momentum, later, first = old[1] is not None, iter(layers), 0

    def moved(numbers: int) -> tuple[list[Tensor], list[int]]:
        """What is read and written of the next numbers, and where their rows begin."""
        part = slice(first, first + numbers)
        each = [(pair[0] if held is None else held)[:, part] for pair in (old, new) for held in pair]
        return each, [tensor.stride(0) for tensor in each]

    for grad in _pieces(grads):
        if grad is None:
            x, dy = next(later)
            (clients, rows, ins), outs = x.shape, dy.shape[2]
            numbers = ins * outs
            each, strides = moved(numbers)
            _sgd_linear_kernel[(triton.cdiv(outs, _OUTS) * triton.cdiv(ins, _INS), clients)](
                *each, x, dy, lr, momentum, decay, *strides, rows, ins, outs, MOMENTUM=has_momentum,
                ROWS=min(64, max(16, power_of_2(rows))), INS=_INS, OUTS=_OUTS, num_warps=4,
            )  # fmt: skip
        else:
            clients, numbers = grad.shape
            each, strides = moved(numbers)
            _sgd_kernel[(triton.cdiv(numbers, _BLOCK), clients)](
                *each, grad, lr, momentum, decay, *strides, grad.stride(0), numbers,
                MOMENTUM=has_momentum, BLOCK=_BLOCK, num_warps=4,
            )  # fmt: skip
        first += numbers


def _pieces(grads: Sequence[Tensor | None]) -> Iterator[Tensor | None]:
    """Gradients as launches take them, and None for each that is not there."""
    known: list[Tensor] = []
    for grad in grads:
        if grad is not None:
            known.append(grad)
            continue
        yield from joined_small(known)
        yield None
        known = []
    yield from joined_small(known)


def joined_small(grads: Sequence[Tensor]) -> Iterator[Tensor]:
    """Gradients side by side, small neighbours as one."""
    groups: list[list[Tensor]] = []
    for grad in grads:
        if groups and max(grad.shape[1], groups[-1][-1].shape[1]) < ALONE:
            groups[-1].append(grad)
        else:
            groups.append([grad])
    for group in groups:
        row = torch.cat(group, 1) if len(group) > 1 else group[0]
        yield row if row.stride(1) == 1 else row.contiguous()
