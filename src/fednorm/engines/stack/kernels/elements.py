"""Triton kernels of one pass over their numbers: dropout, pooling, shortcuts, clients' sums and distances.

Done by torch's operators each is several passes, and a stack of large models is bound by its passes over memory.
"""
# Triton reads annotations of constants at run time, so this file does without `from __future__ import annotations`.

import torch
import triton
import triton.language as tl
from torch import Tensor

from fednorm.engines.stack.kernels.launch import kernel
from fednorm.engines.stack.kernels.norm import cut_of, tile_of_program

_BLOCK = 1024
_SHARES = 4224
"""Programs among which a sum over rows is shared: some for each of a GPU's processors."""
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MUL1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MUL2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _scramble(x):
    """SplitMix64's finaliser, as in `fednorm.core.rng`."""
    x = (x ^ (x >> 30)) * _MUL1
    x = (x ^ (x >> 27)) * _MUL2
    return x ^ (x >> 31)


@kernel("numbers")
def _dropout_kernel(x_ptr, keys_ptr, y_ptr, numbers, channels, pixels, p, BLOCK: tl.constexpr):
    """`rng.uniform` counts in the order (batch, channel, pixel), whatever the layout: (batch, pixel, channel) here."""
    client = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    image, rest = at // (channels * pixels), at % (channels * pixels)
    count = (image * channels + rest % channels) * pixels + rest // channels
    key = tl.load(keys_ptr + client).to(tl.uint64, bitcast=True)
    word = _scramble(_scramble((count + 1).to(tl.uint64) * _GOLDEN + key) ^ key)
    drawn = (word >> 40).to(tl.int32).to(tl.float32) * (1.0 / 16777216)
    here = client.to(tl.int64) * numbers + at
    x = tl.load(x_ptr + here, mask=inside, other=0.0).to(tl.float32)
    y = tl.where(drawn >= p, x / (1.0 - p), 0.0)
    tl.store(y_ptr + here, y.to(y_ptr.dtype.element_ty), mask=inside)


def run_dropout(x: Tensor, keys: Tensor, p: float, channels: int, pixels: int) -> Tensor:
    """x (client, ...) contiguous; each client's numbers lie as (batch, pixel, channel)."""
    y = torch.empty_like(x)
    numbers = x.numel() // len(x)
    grid = (triton.cdiv(numbers, _BLOCK), len(x))
    _dropout_kernel[grid](x, keys.contiguous(), y, numbers, channels, pixels, p, BLOCK=_BLOCK, num_warps=4)
    return y


@kernel("numbers")
def _pool_kernel(
    x_ptr, dy_ptr, out_ptr, numbers, height, width, out_height, out_width,
    CHANNELS: tl.constexpr, SIDE: tl.constexpr, BACKWARD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest of each window; BACKWARD gives the gradient to the first of the largest, in reading order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    channel, pixel = at % CHANNELS, at // CHANNELS
    column, row, image = pixel % out_width, (pixel // out_width) % out_height, pixel // (out_width * out_height)
    corner = ((image * height + row * SIDE) * width + column * SIDE) * CHANNELS + channel
    best = tl.load(x_ptr + corner, mask=inside, other=0.0)
    winner = tl.zeros((BLOCK,), dtype=tl.int32)
    for step in tl.static_range(1, SIDE * SIDE):
        x = tl.load(x_ptr + corner + (step // SIDE * width + step % SIDE) * CHANNELS, mask=inside, other=0.0)
        larger = (x > best) | (x != x)  # what is no number goes on, as in torch
        best = tl.where(larger, x, best)
        winner = tl.where(larger, step, winner)
    if BACKWARD:
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0)
        for step in tl.static_range(SIDE * SIDE):
            there = corner + (step // SIDE * width + step % SIDE) * CHANNELS
            tl.store(out_ptr + there, tl.where(winner == step, dy, 0.0).to(out_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(out_ptr + at, best, mask=inside)


def run_max_pool(x: Tensor, side: int, dy: Tensor | None = None) -> Tensor:
    """Maxima of the windows of x (client, batch, height, width, channel), contiguous; with dy, the gradient of x."""
    clients, batch, height, width, channels = x.shape
    size = height // side, width // side
    if dy is None:
        out = x.new_empty(clients, batch, *size, channels)
    elif (size[0] * side, size[1] * side) == (height, width):
        out = torch.empty_like(x)
    else:
        out = torch.zeros_like(x)  # pixels at the edge are in no window
    numbers = clients * batch * size[0] * size[1] * channels
    _pool_kernel[(triton.cdiv(numbers, _BLOCK),)](
        x, x if dy is None else dy, out, numbers, height, width, *size,
        CHANNELS=channels, SIDE=side, BACKWARD=dy is not None, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return out


@kernel("numbers")
def _thin_kernel(
    x_ptr, y_ptr, numbers, height, width, out_height, out_width,
    CHANNELS: tl.constexpr, OUT: tl.constexpr, BEFORE: tl.constexpr, STRIDE: tl.constexpr, BACKWARD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Every STRIDE-th pixel, its channels after BEFORE zeros; BACKWARD puts them back where they were taken from."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    channel, pixel = at % OUT, at // OUT
    column, row, image = pixel % out_width, (pixel // out_width) % out_height, pixel // (out_width * out_height)
    if BACKWARD:
        from_row, from_column, from_channel = row // STRIDE, column // STRIDE, channel + BEFORE
        there = (row % STRIDE == 0) & (column % STRIDE == 0)
    else:
        from_row, from_column, from_channel = row * STRIDE, column * STRIDE, channel - BEFORE
        there = (from_channel >= 0) & (from_channel < CHANNELS)
    source = ((image * height + from_row) * width + from_column) * CHANNELS + from_channel
    tl.store(y_ptr + at, tl.load(x_ptr + source, mask=inside & there, other=0.0), mask=inside)


def run_thin(x: Tensor, size: tuple[int, int], channels: int, before: int, stride: int, backward: bool) -> Tensor:
    """x (client, batch, height, width, channel), contiguous, thinned to a size and widened to `channels`, or back."""
    y = x.new_empty(*x.shape[:2], *size, channels)
    _thin_kernel[(triton.cdiv(y.numel(), _BLOCK),)](
        x, y, y.numel(), x.shape[2], x.shape[3], *size,
        CHANNELS=x.shape[4], OUT=channels, BEFORE=before, STRIDE=stride, BACKWARD=backward, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return y


@kernel("rows", "chunks")
def _relu_grad_kernel(
    dy_ptr, y_ptr, out_ptr, part_ptr, rows, chunks, CHANNELS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    channel, mask, at = tile_of_program(rows, CHANNELS, ROWS, BLOCK)
    dy = tl.load(dy_ptr + at, mask=mask, other=0.0)
    dy = tl.where(tl.load(y_ptr + at, mask=mask, other=0.0) <= 0, 0.0, dy).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, dy, mask=mask)
    part = part_ptr + (tl.program_id(1).to(tl.int64) * chunks + tl.program_id(0)) * CHANNELS + channel
    tl.store(part, tl.sum(dy.to(tl.float32), 0), mask=channel < CHANNELS)


def run_relu_grad(dy: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient behind a ReLU with output y (client, ..., channel), contiguous, and its sums over pixels."""
    cut = cut_of(y)._replace(tiles=1)
    out, parts = torch.empty_like(dy), torch.empty(cut.clients, cut.chunks, cut.channels, device=y.device)
    _relu_grad_kernel[cut.grid](
        dy, y, out, parts, cut.rows, cut.chunks, CHANNELS=cut.channels, ROWS=cut.tile, BLOCK=cut.block, num_warps=8
    )
    return out, parts.sum(1)


@kernel()
def _fold_kernel(
    stack_ptr, weight_ptr, out_ptr, run_stride, client_stride, numbers, CLIENTS: tl.constexpr, BLOCK: tl.constexpr
):
    run = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    here = stack_ptr + run.to(tl.int64) * run_stride + at
    for client in range(CLIENTS):
        x = tl.load(here, mask=inside, other=0.0).to(tl.float64)
        total += x * tl.load(weight_ptr + run * CLIENTS + client)
        here += client_stride
    tl.store(out_ptr + run.to(tl.int64) * numbers + at, total.to(out_ptr.dtype.element_ty), mask=inside)


def run_fold(stack: Tensor, weights: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """sum_k p_k x_k of stacks (run, client, number) with weights (run, client): in float64, then rounded to a type."""
    runs, clients, numbers = stack.shape
    out = torch.empty(runs, numbers, dtype=dtype, device=stack.device)
    block = min(_BLOCK, max(32, triton.next_power_of_2(numbers)))
    _fold_kernel[(triton.cdiv(numbers, block), runs)](
        stack, weights.contiguous(), out, stack.stride(0), stack.stride(1), numbers,
        CLIENTS=clients, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


@kernel("numbers", "turns")
def _moved_kernel(
    end_ptr, begun_ptr, part_ptr, end_stride, begun_stride, clients, numbers, turns, BLOCK: tl.constexpr
):  # fmt: skip
    """A share of a row's numbers: how far they are from those they began at, squared, and their sum."""
    row, share = tl.program_id(0), tl.program_id(1)
    end_ptr += row.to(tl.int64) * end_stride
    begun_ptr += (row // clients).to(tl.int64) * begun_stride
    squares = tl.zeros((BLOCK,), dtype=tl.float64)
    sums = tl.zeros((BLOCK,), dtype=tl.float64)
    for turn in range(turns):
        at = (share * turns + turn) * BLOCK + tl.arange(0, BLOCK)
        end = tl.load(end_ptr + at, mask=at < numbers, other=0.0)
        away = (end - tl.load(begun_ptr + at, mask=at < numbers, other=0.0)).to(tl.float64)
        squares += away * away
        sums += end.to(tl.float64)
    part = part_ptr + row * tl.num_programs(1) + share
    tl.store(part, tl.sum(squares, 0))
    tl.store(part + tl.num_programs(0) * tl.num_programs(1), tl.sum(sums, 0))


def run_moved(end: Tensor, begun: Tensor) -> Tensor:
    """(2, client) in float64: squared distances of rows (client, number) from those of their runs, and their sums."""
    clients, numbers = end.shape
    turns = max(1, clients * triton.cdiv(numbers, _BLOCK) // _SHARES)
    shares = triton.cdiv(numbers, _BLOCK * turns)
    parts = torch.empty(2, clients, shares, dtype=torch.float64, device=end.device)
    _moved_kernel[(clients, shares)](
        end, begun, parts, end.stride(0), begun.stride(0), clients // len(begun), numbers, turns,
        BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return parts.sum(2)


@kernel("numbers", "rows")
def _spread_kernel(row_ptr, out_ptr, step, out_stride, numbers, rows, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    value = tl.load(row_ptr + at * step, mask=inside)
    for _ in range(rows):
        tl.store(out_ptr + at, value, mask=inside)
        out_ptr += out_stride


def run_spread(out: Tensor, row: Tensor) -> None:
    """Write a row (number), or one number that is all of them, to all rows of a matrix."""
    rows, numbers = out.shape
    grid = (triton.cdiv(numbers, _BLOCK),)
    _spread_kernel[grid](row, out, row.stride(0), out.stride(0), numbers, rows, BLOCK=_BLOCK, num_warps=4)
