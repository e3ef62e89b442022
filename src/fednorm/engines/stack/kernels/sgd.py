"""Triton kernels of SGD: one pass over values, gradients and velocities.

The gradient of a large linear layer's weights is not written down: it is a product over the few rows of a batch, taken
where its numbers are used, which spares a layer of millions of weights two of seven passes over them.
"""
# Triton reads annotations of constants at run time, so this file does without `from __future__ import annotations`.

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from fednorm.engines.stack.kernels.gradients import BLOCK, gradient_of, shares, summed
from fednorm.engines.stack.kernels.launch import kernel
from fednorm.engines.stack.kernels.tiles import power_of_2

_OUTS, _INS, _WARPS = 16, 64, 8
"""Weights and warps of a tile: rows long enough to be read in one go, and four numbers a thread, which is as many as
it reads at once. With more the compiler has one arrangement for what is wide and one for what is rounded."""
_TILES = 4
"""that a program takes one after the other, with the next one's weights on their way: 4.0 TB/s in place of 3.8"""
_MOST_ROWS = 64
"""of a batch that are multiplied at a time"""


@triton.jit
def _rates(lr_ptr, momentum_ptr, decay_ptr):
    """A client's three numbers: asked for before all else, since what was written may be what is read later."""
    client = tl.program_id(1)
    return tl.load(lr_ptr + client), tl.load(momentum_ptr + client), tl.load(decay_ptr + client)


@triton.jit
def _held(at, inside, value_ptr, velocity_ptr, value_stride, velocity_stride, MOMENTUM: tl.constexpr):
    """Values and velocities of a client's row: asked for before gradients, so that both are on their way at once."""
    row = tl.program_id(1).to(tl.int64)
    value = tl.load(value_ptr + row * value_stride + at, mask=inside, other=0.0)
    velocity = tl.load(velocity_ptr + row * velocity_stride + at, mask=inside, other=0.0) if MOMENTUM else value
    return value, velocity


@triton.jit
def _move(
    value, velocity, grad, at, inside, new_ptr, new_velocity_ptr, rounded_ptr, rates,
    new_stride, new_velocity_stride, rounded_stride, MOMENTUM: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Write what values and velocities of a client's row become."""
    row = tl.program_id(1).to(tl.int64)
    lr, momentum, decay = rates
    step = grad + decay * value
    if MOMENTUM:
        step = momentum * velocity + step
        tl.store(new_velocity_ptr + row * new_velocity_stride + at, step, mask=inside)
    value -= lr * step
    tl.store(new_ptr + row * new_stride + at, value, mask=inside)
    if ROUNDED:
        tl.store(rounded_ptr + row * rounded_stride + at, value.to(rounded_ptr.dtype.element_ty), mask=inside)


@kernel()
def _sgd_kernel(
    value_ptr, velocity_ptr, new_ptr, new_velocity_ptr, rounded_ptr, sources, place_ptr, grad_stride, numbers, parts,
    lr_ptr, momentum_ptr, decay_ptr, value_stride, velocity_stride, new_stride, new_velocity_stride, rounded_stride,
    MOMENTUM: tl.constexpr, ROUNDED: tl.constexpr, LISTED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row, rates = tl.program_id(1).to(tl.int64), _rates(lr_ptr, momentum_ptr, decay_ptr)
    at, inside, grad_ptr, numbers, parts = gradient_of(
        sources, place_ptr, row, grad_stride, numbers, parts, LISTED, LANES
    )
    value, velocity = _held(at, inside, value_ptr, velocity_ptr, value_stride, velocity_stride, MOMENTUM)
    grad = summed(grad_ptr, inside, numbers, parts, LANES)
    _move(
        value, velocity, grad, at, inside, new_ptr, new_velocity_ptr, rounded_ptr, rates,
        new_stride, new_velocity_stride, rounded_stride, MOMENTUM, ROUNDED,
    )  # fmt: skip


@kernel("rows")
def _sgd_linear_kernel(
    value_ptr, velocity_ptr, new_ptr, new_velocity_ptr, rounded_ptr, x_ptr, dy_ptr, lr_ptr, momentum_ptr, decay_ptr,
    value_stride, velocity_stride, new_stride, new_velocity_stride, rounded_stride, rows, ins, outs,
    MOMENTUM: tl.constexpr, ROUNDED: tl.constexpr, ROWS: tl.constexpr, TURNS: tl.constexpr, INS: tl.constexpr,
    OUTS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The same of weights (out, in), whose gradient is dy^T x; a program has some tiles along the inputs."""
    row, rates = tl.program_id(1).to(tl.int64), _rates(lr_ptr, momentum_ptr, decay_ptr)
    blocks = tl.cdiv(ins, INS * TILES)
    out = tl.program_id(0) // blocks * OUTS + tl.arange(0, OUTS)
    taken = tl.program_id(0) % blocks * (INS * TILES) + tl.arange(0, INS)
    at = out[:, None] * ins + taken[None, :]
    inside = (out < outs)[:, None] & (taken < ins)[None, :]
    value, velocity = _held(at, inside, value_ptr, velocity_ptr, value_stride, velocity_stride, MOMENTUM)
    for tile in range(TILES):
        later = taken + INS
        at_later = out[:, None] * ins + later[None, :]
        inside_later = (out < outs)[:, None] & (later < ins)[None, :] & (tile + 1 < TILES)
        value_later, velocity_later = _held(
            at_later, inside_later, value_ptr, velocity_ptr, value_stride, velocity_stride, MOMENTUM
        )
        grad = tl.zeros((OUTS, INS), dtype=tl.float32)
        for turn in tl.static_range(TURNS):
            example = turn * ROWS + tl.arange(0, ROWS)
            known = (example < rows)[:, None]
            place = (row * rows + example)[:, None]
            dy = tl.load(dy_ptr + place * outs + out[None, :], known & (out < outs)[None, :], 0.0)
            x = tl.load(x_ptr + place * ins + taken[None, :], known & (taken < ins)[None, :], 0.0)
            grad = tl.dot(tl.trans(dy), x, grad, input_precision="ieee")
        _move(
            value, velocity, grad, at, inside, new_ptr, new_velocity_ptr, rounded_ptr, rates,
            new_stride, new_velocity_stride, rounded_stride, MOMENTUM, ROUNDED,
        )  # fmt: skip
        value, velocity, at, inside, taken = value_later, velocity_later, at_later, inside_later, later


Pair = tuple[Tensor, Tensor | None]


def run_sgd(
    old: Pair, grads: Sequence[Tensor | None], new: Pair, lr: Tensor, momentum: Tensor, decay: Tensor,
    layers: Sequence[tuple[Tensor, Tensor]] = (), rounded: Tensor | None = None,
) -> None:  # fmt: skip
    """Write values (client, number) and velocities after a step; `new` may be `old`. The gradients lie side by side.

    The values are written in a narrow type as well where there is `rounded` for it.

    They are (client, number), or (client, part, number) where parts are still to be added. One that is None is that of
    a linear layer's weights: the next of `layers` has its inputs (client, row, in) and the gradients of its outputs
    (client, row, out), contiguous.
    """
    clients, kinds = len(lr), {"MOMENTUM": old[1] is not None, "ROUNDED": rounded is not None}

    def moved(numbers: slice) -> tuple[list[Tensor], list[int]]:
        """What is read and written of these numbers, and where their rows begin."""
        each = [(old[0] if held is None else held)[:, numbers] for held in (*old, *new, rounded)]
        return each, [tensor.stride(0) for tensor in each]

    given: list[tuple[int, Tensor]] = []
    first, later = 0, iter(layers)
    for grad in grads:
        if grad is not None:
            given.append((first, grad))
            first += grad.shape[-1]
            continue
        x, dy = next(later)
        (_, rows, ins), outs = x.shape, dy.shape[2]
        each, strides = moved(slice(first, first + ins * outs))
        at_once = min(_MOST_ROWS, max(16, power_of_2(rows)))
        _sgd_linear_kernel[(triton.cdiv(outs, _OUTS) * triton.cdiv(ins, _INS * _TILES), clients)](
            *each, x, dy, lr, momentum, decay, *strides, rows, ins, outs, **kinds,
            ROWS=at_once, TURNS=triton.cdiv(rows, at_once), INS=_INS, OUTS=_OUTS, TILES=_TILES,
            num_warps=_WARPS,
        )  # fmt: skip
        first += ins * outs
    for share in shares(given):
        each, strides = moved(share.numbers)
        _sgd_kernel[(share.blocks, clients)](
            *each, *share.read, lr, momentum, decay, *strides,
            **kinds, LISTED=share.places is not None, LANES=BLOCK, num_warps=4,
        )  # fmt: skip
