"""Triton kernels for the batch norms of a stack of clients, activations laid out with the channel last.

Programs take the moments of a chunk of pixels (or the convolution before took them), and the next launch joins the
chunks by Chan's rule, so that no large sums cancel, before it writes its tile: normalised, with what a residual block
adds and the ReLU or ReLU6 that follows. Of very many chunks a launch in between joins them once for all. The backward
pass is two launches as well. Where `training` is false the same kernels normalise by the running statistics.
"""
# Triton reads annotations of constants at run time, so this file does without `from __future__ import annotations`.

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fednorm.engines.stack.kernels.launch import kernel
from fednorm.engines.stack.kernels.tiles import words


@triton.jit
def _numbers_of(tile, client, channel, rows, channels, ROWS: tl.constexpr):
    """Which of the numbers of a client's tile there are, and where they lie."""
    row = tile * ROWS + tl.arange(0, ROWS)
    mask = (row < rows)[:, None] & (channel < channels)[None, :]
    return mask, (client * rows + row)[:, None] * channels + channel[None, :]


@triton.jit
def tile_of_program(rows, channels, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The channels of this program of a `Cut`, which of its tile's numbers there are, and where they lie."""
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask, at = _numbers_of(tl.program_id(0), tl.program_id(1).to(tl.int64), channel, rows, channels, ROWS)
    return channel, mask, at


@triton.jit
def _rectified(y, CEILING: tl.constexpr):
    """What a ReLU leaves of y, or a ReLU6 with its ceiling; what is no number stays.

    A GPU rounds and rectifies at once what is written like this; a choice took a fifth of the kernel's instructions.
    """
    y = tl.maximum(y, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if CEILING is not None:
        y = tl.minimum(y, CEILING, propagate_nan=tl.PropagateNan.ALL)
    return y


@triton.jit
def _normalised(x, mean, scale, beta):
    """What a norm makes of x, forward and where a gradient computes it anew: to the bit the same, rounded alike."""
    return (x - mean[None, :]) * scale[None, :] + beta[None, :]


@triton.jit
def _through(dy, x_ptr, y_ptr, at, mask, mean, scale, beta, ANEW: tl.constexpr, CEILING: tl.constexpr):
    """The gradient in front of a ReLU, or a ReLU6, from the gradient behind it and what it left.

    That is read, or of a ReLU computed ANEW from the norm's input, with the same roundings: the input is read anyway,
    and once, since the compiler sees that both reads are one.
    """
    if ANEW:
        x = tl.load(x_ptr + at, mask=mask, other=0.0)
        y = _normalised(x.to(tl.float32), mean, scale, beta).to(x.dtype).to(tl.float32)
    else:
        y = tl.load(y_ptr + at, mask=mask, other=0.0).to(tl.float32)
    dy = tl.where(y <= 0, 0.0, dy)
    if CEILING is not None:
        dy = tl.where(y >= CEILING, 0.0, dy)
    return dy


_TURN = tl.constexpr(4)
"""Rows of a tile that a thread of 8 warps has, if it reads 16 bytes at once."""


# One kernel for batches and channels of all numbers: with a network's channels as constants, each of its layers would
# take a second to compile.
@kernel("rows", "chunks", "channel_words")
def _moments_kernel(
    x_ptr, part_ptr, rows, chunks, channel_words, WORD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    chunk = tl.program_id(0)
    client = tl.program_id(1).to(tl.int64)
    channels = channel_words * WORD
    channel, mask, at = tile_of_program(rows, channels, ROWS, BLOCK)
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, 0) / tl.minimum(rows - chunk * ROWS, ROWS).to(tl.float32)
    away = tl.where(mask, x - mean[None, :], 0.0)
    base = part_ptr + (client * chunks + chunk) * (2 * channels) + channel
    tl.store(base, mean, mask=channel < channels)
    tl.store(base + channels, tl.sum(away * away, 0), mask=channel < channels)


@triton.jit
def _join(
    part_ptr, client, part_rows, rows, parts, channel, channels,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Mean and biased variance of a client's channels, from the moments of its parts."""
    base = part_ptr + client * parts * (2 * channels) + channel[None, :]
    inside = (channel < channels)[None, :]
    mean = tl.zeros((BLOCK,), dtype=tl.float32)
    for turn in tl.static_range(TURNS):
        part = turn * PARTS + tl.arange(0, PARTS)
        count = tl.minimum(tl.maximum(rows - part * part_rows, 0), part_rows).to(tl.float32)
        at = part[:, None] * (2 * channels)
        means = tl.load(base + at, mask=(part < parts)[:, None] & inside, other=0.0)
        mean += tl.sum(means * count[:, None], 0)
    mean = mean / rows
    var = tl.zeros((BLOCK,), dtype=tl.float32)
    for turn in tl.static_range(TURNS):
        part = turn * PARTS + tl.arange(0, PARTS)
        count = tl.minimum(tl.maximum(rows - part * part_rows, 0), part_rows).to(tl.float32)
        at = part[:, None] * (2 * channels)
        mask = (part < parts)[:, None] & inside
        away = tl.load(base + at, mask=mask, other=0.0) - mean[None, :]
        squares = tl.load(base + at + channels, mask=mask, other=0.0)
        var += tl.sum(squares + away * away * count[:, None], 0)
    return mean, var / rows


@kernel("rows", "parts", "part_rows", "channel_words")
def _join_kernel(
    part_ptr, whole_ptr, rows, parts, part_rows, channel_words,
    WORD: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """The moments of all a client's pixels, as those of one part."""
    client = tl.program_id(0).to(tl.int64)
    channels = channel_words * WORD
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mean, var = _join(part_ptr, client, part_rows, rows, parts, channel, channels, BLOCK, PARTS, TURNS)
    whole = whole_ptr + client * (2 * channels) + channel
    tl.store(whole, mean, mask=channel < channels)
    tl.store(whole + channels, var * rows, mask=channel < channels)


@kernel("rows", "parts", "part_rows", "channel_words")
def _normalise_kernel(
    x_ptr, part_ptr, gamma_ptr, beta_ptr, add_ptr, old_mean_ptr, old_var_ptr, counter_ptr,
    y_ptr, mean_ptr, var_ptr, new_mean_ptr, new_var_ptr, new_counter_ptr,
    gamma_stride, beta_stride, old_mean_stride, old_var_stride, counter_stride, rows, parts, part_rows, channel_words,
    rate, eps, WORD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, PARTS: tl.constexpr,
    TURNS: tl.constexpr, TRAINING: tl.constexpr, ADD: tl.constexpr, RELU: tl.constexpr, CEILING: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    client = tl.program_id(1).to(tl.int64)
    channels = channel_words * WORD
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    cell = client * channels + channel
    old_mean = tl.load(old_mean_ptr + client * old_mean_stride + channel, mask=inside, other=0.0)
    old_var = tl.load(old_var_ptr + client * old_var_stride + channel, mask=inside, other=1.0)
    if TRAINING:
        mean, var = _join(part_ptr, client, part_rows, rows, parts, channel, channels, BLOCK, PARTS, TURNS)
    else:
        mean, var = old_mean, old_var
    scale = tl.load(gamma_ptr + client * gamma_stride + channel, mask=inside, other=0.0) * tl.rsqrt(var + eps)
    beta = tl.load(beta_ptr + client * beta_stride + channel, mask=inside, other=0.0)
    if chunk == 0:
        tl.store(mean_ptr + cell, mean, mask=inside)
        tl.store(var_ptr + cell, var, mask=inside)
        if TRAINING:
            tl.store(new_mean_ptr + cell, old_mean + rate * (mean - old_mean), mask=inside)
            unbiased = var * (rows / (rows - 1.0))
            tl.store(new_var_ptr + cell, old_var + rate * (unbiased - old_var), mask=inside)
            tl.store(new_counter_ptr + client, tl.load(counter_ptr + client * counter_stride) + 1)
    for tile in range(TILES):
        mask, at = _numbers_of(chunk * TILES + tile, client, channel, rows, channels, ROWS)
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        y = _normalised(x, mean, scale, beta)
        if ADD:
            y += tl.load(add_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if RELU:
            y = _rectified(y, CEILING)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel("rows", "chunks", "channel_words")
def _grad_sums_kernel(
    x_ptr, dy_ptr, y_ptr, mean_ptr, var_ptr, gamma_ptr, beta_ptr, part_ptr, gamma_stride, beta_stride, rows, chunks,
    channel_words, eps, WORD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
    RELU: tl.constexpr, ANEW: tl.constexpr, CEILING: tl.constexpr,
):  # fmt: skip
    """Sums of a chunk of gradients, and of gradients times what was normalised.

    Each thread adds up its own rows of all tiles first: the sums over threads are dearer than all else.
    """
    chunk = tl.program_id(0)
    client = tl.program_id(1).to(tl.int64)
    channels = channel_words * WORD
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    mean = tl.load(mean_ptr + client * channels + channel, mask=inside, other=0.0)
    var = tl.load(var_ptr + client * channels + channel, mask=inside, other=1.0)
    scale = tl.load(gamma_ptr + client * gamma_stride + channel, mask=inside, other=0.0) * tl.rsqrt(var + eps)
    beta = tl.load(beta_ptr + client * beta_stride + channel, mask=inside, other=0.0)
    plain = tl.zeros((ROWS // _TURN, BLOCK), dtype=tl.float32)
    times_hat = tl.zeros((ROWS // _TURN, BLOCK), dtype=tl.float32)
    for tile in range(TILES):
        mask, at = _numbers_of(chunk * TILES + tile, client, channel, rows, channels, ROWS)
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if RELU:
            dy = _through(dy, x_ptr, y_ptr, at, mask, mean, scale, beta, ANEW, CEILING)
        plain += tl.sum(tl.reshape(dy, (_TURN, ROWS // _TURN, BLOCK)), 0)
        times_hat += tl.sum(tl.reshape(dy * (x - mean[None, :]), (_TURN, ROWS // _TURN, BLOCK)), 0)
    base = part_ptr + (client * chunks + chunk) * (2 * channels) + channel
    tl.store(base, tl.sum(plain, 0), mask=inside)
    tl.store(base + channels, tl.sum(times_hat, 0) * tl.rsqrt(var + eps), mask=inside)


@kernel("rows", "chunks", "channel_words")
def _input_grad_kernel(
    x_ptr, dy_ptr, y_ptr, mean_ptr, var_ptr, gamma_ptr, beta_ptr, part_ptr, dx_ptr, dgamma_ptr, dbeta_ptr, masked_ptr,
    gamma_stride, beta_stride, rows, chunks, channel_words, eps,
    WORD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, CHUNKS: tl.constexpr,
    TRAINING: tl.constexpr, RELU: tl.constexpr, ANEW: tl.constexpr, CEILING: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    client = tl.program_id(1).to(tl.int64)
    channels = channel_words * WORD
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    cell = client * channels + channel
    every = tl.arange(0, CHUNKS)
    part = part_ptr + (client * chunks + every)[:, None] * (2 * channels) + channel[None, :]
    known = (every < chunks)[:, None] & inside[None, :]
    dbeta = tl.sum(tl.load(part, mask=known, other=0.0), 0)
    dgamma = tl.sum(tl.load(part + channels, mask=known, other=0.0), 0)
    if chunk == 0:
        tl.store(dgamma_ptr + cell, dgamma, mask=inside)
        tl.store(dbeta_ptr + cell, dbeta, mask=inside)
    mean = tl.load(mean_ptr + cell, mask=inside, other=0.0)
    inverse = tl.rsqrt(tl.load(var_ptr + cell, mask=inside, other=1.0) + eps)
    scale = tl.load(gamma_ptr + client * gamma_stride + channel, mask=inside, other=0.0) * inverse
    beta = tl.load(beta_ptr + client * beta_stride + channel, mask=inside, other=0.0)
    # By channel, so that a number takes two products: scale (dy - dbeta / rows - (x - mean) inverse dgamma / rows).
    constant, slope = -scale * dbeta / rows, -scale * inverse * dgamma / rows
    for tile in range(TILES):
        mask, at = _numbers_of(chunk * TILES + tile, client, channel, rows, channels, ROWS)
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if RELU:
            dy = _through(dy, x_ptr, y_ptr, at, mask, mean, scale, beta, ANEW, CEILING)
        if MASKED:
            tl.store(masked_ptr + at, dy.to(masked_ptr.dtype.element_ty), mask=mask)
        dx = scale[None, :] * dy
        if TRAINING:
            x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
            dx += constant[None, :] + slope[None, :] * (x - mean[None, :])
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)


class Cut(NamedTuple):
    """How a channels-last stack is cut into programs."""

    clients: int
    rows: int
    channels: int
    tile: int
    """rows of a tile"""
    tiles: int
    """that a program takes, one after the other: its chunk"""
    block: int
    """channels of a tile"""

    @property
    def chunks(self) -> int:
        return triton.cdiv(self.rows, self.tile * self.tiles)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.chunks, self.clients, triton.cdiv(self.channels, self.block)


_ELEMENTS = 8192
"""Numbers of a tile, which stays in registers."""
_ENOUGH, _MOST_TILES = 528, 8
"""Programs that keep a GPU busy. Where there would be more, each takes several tiles: what it does once, which is to
join the moments or sums of all, takes as long as a tile."""
_FEWEST_PARTS, _MOST_PARTS = 16, 128
"""Parts joined at a time; where there are fewer, the same kernel serves, unless there is nothing to join."""

_MOST_CHUNKS = 256
"""Sums that every program may add up; more are added up before."""
_FEW_CHANNELS = 16
"""Channels of a program that only joins: few, so that there are enough programs."""
_MOST_JOINED = 4096
"""Numbers that each program of a batch norm may join; of more it would read as much as of the images themselves."""


def _at_once(parts: int, most: int) -> int:
    """How many of the parts a kernel joins at a time: a power of 2."""
    return 1 if parts == 1 else min(most, max(_FEWEST_PARTS, triton.next_power_of_2(parts)))


def cut_of(x: Tensor) -> Cut:
    """The cut of activations (client, ..., channel)."""
    clients, channels = x.shape[0], x.shape[-1]
    rows = x.numel() // (clients * channels)
    block = min(64, triton.next_power_of_2(channels))
    tile = _ELEMENTS // block
    programs = triton.cdiv(rows, tile) * clients * triton.cdiv(channels, block)
    tiles = 1
    while tiles < _MOST_TILES and programs >= 2 * tiles * _ENOUGH:
        tiles *= 2
    return Cut(clients, rows, channels, tile, tiles, block)


class Running(NamedTuple):
    """The running statistics of a stack of batch norms: (client, channel) each, and the counters (client,)."""

    mean: Tensor
    var: Tensor
    counter: Tensor


def run_norm(
    x: Tensor, gamma: Tensor, beta: Tensor, running: Running, *, training: bool, rate: float, eps: float,
    addend: Tensor | None = None, relu: bool = False, ceiling: float | None = None,
    parts: tuple[Tensor, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Running]:  # fmt: skip
    """y, mean and biased variance of x (client, ..., channel), contiguous, and the moved running statistics.

    Vectors of channels may lie apart from client to client, as views into a longer row. `parts` are moments that the
    convolution before took, and how many pixels each is of.
    """
    cut = cut_of(x)
    count, word = words(cut.channels)
    if training and parts is None:
        one = cut._replace(tiles=1)
        taken = torch.empty(one.clients, one.chunks, 2, one.channels, device=x.device)
        _moments_kernel[one.grid](
            x, taken, one.rows, one.chunks, count, WORD=word, ROWS=one.tile, BLOCK=one.block, num_warps=8
        )
        parts = taken, one.tile
    if training and parts is not None and parts[0].shape[1] * cut.block > _MOST_JOINED:
        parts = _joined(*parts, cut), cut.rows
    moments, part_rows = parts or (gamma, 1)
    joined = moments.shape[1] if training else 1
    at_once = _at_once(joined, _MOST_PARTS)
    y = torch.empty_like(x)
    mean, var = (torch.empty(cut.clients, cut.channels, device=x.device) for _ in range(2))
    moved = Running(*(each.new_empty(each.shape) for each in running)) if training else running
    strides = [each.stride(0) for each in (gamma, beta, *running)]
    _normalise_kernel[cut.grid](
        x, moments, gamma, beta, x if addend is None else addend, *running, y, mean, var, *moved, *strides,
        cut.rows, joined, part_rows, count, rate, eps, WORD=word, ROWS=cut.tile, BLOCK=cut.block, TILES=cut.tiles,
        PARTS=at_once, TURNS=triton.cdiv(joined, at_once), TRAINING=training, ADD=addend is not None, RELU=relu,
        CEILING=ceiling, num_warps=8,
    )  # fmt: skip
    return y, mean, var, moved


def _joined(parts: Tensor, part_rows: int, cut: Cut) -> Tensor:
    """The moments of all pixels (client, 1, 2, channel), from those of their parts."""
    whole = torch.empty(cut.clients, 1, 2, cut.channels, device=parts.device)
    (count, word), block = words(cut.channels), min(_FEW_CHANNELS, cut.block)
    turns = triton.next_power_of_2(triton.cdiv(parts.shape[1], _MOST_PARTS))  # so that few kernels serve all
    _join_kernel[(cut.clients, triton.cdiv(cut.channels, block))](
        parts, whole, cut.rows, parts.shape[1], part_rows, count,
        WORD=word, BLOCK=block, PARTS=_MOST_PARTS, TURNS=turns, num_warps=4,
    )  # fmt: skip
    return whole


def run_norm_grad(
    x: Tensor, dy: Tensor, mean: Tensor, var: Tensor, gamma: Tensor, *, training: bool, eps: float,
    y: Tensor | None = None, beta: Tensor | None = None, ceiling: float | None = None, masked: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, gamma and beta; with y, dy is that behind its ReLU; the one in front is what `masked` adds.

    With beta in place of y it is that behind the ReLU of a norm to which nothing was added, and y is computed anew. Not
    so with a ceiling: the first kernel would take so many registers that fewer programs run side by side.
    """
    cut = cut_of(x)
    parts = torch.empty(cut.clients, cut.chunks, 2, cut.channels, device=x.device)
    count, word = words(cut.channels)
    shape = {"WORD": word, "ROWS": cut.tile, "BLOCK": cut.block, "TILES": cut.tiles, "num_warps": 8}
    shape |= {"RELU": y is not None or beta is not None, "ANEW": beta is not None, "CEILING": ceiling}
    given = x, dy, x if y is None else y, mean, var, gamma, gamma if beta is None else beta
    strides = gamma.stride(0), 0 if beta is None else beta.stride(0)
    _grad_sums_kernel[cut.grid](*given, parts, *strides, cut.rows, cut.chunks, count, eps, **shape)
    if cut.chunks > _MOST_CHUNKS or cut.chunks * cut.block > _MOST_JOINED:
        parts = parts.sum(1, keepdim=True)
    dx = torch.empty_like(x)
    through = torch.empty_like(dy) if masked else dy.new_empty(0)
    dgamma, dbeta = (torch.empty(cut.clients, cut.channels, device=x.device) for _ in range(2))
    _input_grad_kernel[cut.grid](
        *given, parts, dx, dgamma, dbeta, through, *strides, cut.rows, parts.shape[1], count, eps,
        CHUNKS=_at_once(parts.shape[1], _MOST_CHUNKS), TRAINING=training, MASKED=masked, **shape,
    )  # fmt: skip
    return dx, dgamma, dbeta, through
