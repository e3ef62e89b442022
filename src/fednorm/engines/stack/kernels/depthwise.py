"""Triton kernels for depthwise convolutions of a stack of clients, activations laid out with the channel last.

Every channel has a filter of its own, so there is no product of matrices: a pass over memory is all the work. A program
has channels of pixels in columns, one below the other, whose taps meet many of the same numbers; these are read once.
Numbers of channels and sizes of images are no constants, so that a network's layers share a few kernels. Filters are
(client, channel, height, width).
"""
# Triton reads annotations of constants at run time, so this file does without `from __future__ import annotations`.
# Type checkers cannot know what the tuples of a jitted kernel hold.
# pyright: reportAttributeAccessIssue=false

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fednorm.engines.stack.kernels.launch import kernel
from fednorm.engines.stack.kernels.tiles import (
    DEPTH_PIXELS,
    DEPTH_TAPS,
    FILTER_PIXELS,
    depth_block,
    depth_rows,
    filter_cut,
    words,
)


class Depth(NamedTuple):
    """The static part of a depthwise convolution."""

    stride: int
    pad_h: int
    pad_w: int
    kernel_h: int
    kernel_w: int
    dilation: int = 1

    @property
    def constants(self) -> dict[str, int]:
        """As the kernels name them."""
        stride, pad_h, pad_w, kernel_h, kernel_w, dilation = self
        sizes = {"KH": kernel_h, "KW": kernel_w, "STRIDE": stride, "DILATION": dilation}
        return {**sizes, "PAD_H": pad_h, "PAD_W": pad_w}


_SIZES = ["batch", "in_height", "in_width", "out_height", "out_width", "words"]


@triton.jit
def _block(channels, BLOCK: tl.constexpr):
    """Which tile of pixels and which channels this program has; programs side by side have neighbouring channels."""
    blocks = tl.cdiv(channels, BLOCK)
    return tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)


@triton.constexpr_function
def _tap(step, row, taps, rows, stride, dilation, backward):
    """Which row of a filter's taps meets a row of x, counted from the first that a column reads; -1 for none."""
    offset = step - (rows - 1 - row if backward else row * stride)
    return offset // dilation if 0 <= offset < taps * dilation and offset % dilation == 0 else -1


@triton.constexpr_function
def _is_read(step, taps, rows, stride, dilation, backward):
    """Whether a tap of any pixel of a column meets this row of x."""
    return any(_tap(step, row, taps, rows, stride, dilation, backward) >= 0 for row in range(rows))


@kernel(*_SIZES, "tiles")
def _depth_kernel(
    x_ptr, w_ptr, y_ptr, part_ptr, w_stride, batch, in_height, in_width, out_height, out_width, words, tiles,
    KH: tl.constexpr, KW: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr, PAD_H: tl.constexpr,
    PAD_W: tl.constexpr, BACKWARD: tl.constexpr, MOMENTS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, WORD: tl.constexpr,
):  # fmt: skip
    """y = conv(x, w), or with BACKWARD the gradient of the input, where x is dy.

    MOMENTS leaves mean and squared deviations of each tile's pixels, for a batch norm; then ROWS divide the height.
    """
    client = tl.program_id(1).to(tl.int64)
    channels = words * WORD  # so that the compiler knows how wide words may be
    tile, channel = _block(channels, BLOCK)
    known = channel < channels
    high = tl.cdiv(out_height, ROWS)
    index = tile * COLUMNS + tl.arange(0, COLUMNS)
    column, row, image = index % out_width, index // out_width % high * ROWS, index // (out_width * high)
    inside = image < batch
    x_base = x_ptr + client * (batch * in_height * in_width * channels)
    filters = w_ptr + client * w_stride + channel * (KH * KW)
    sums = ()
    for _ in tl.static_range(ROWS):
        sums = sums + (tl.zeros((COLUMNS, BLOCK), dtype=tl.float32),)  # noqa: RUF005 (all that Triton knows)
    for step in tl.static_range((KH - 1) * DILATION + 1 + (ROWS - 1) * (1 if BACKWARD else STRIDE)):
        if _is_read(step, KH, ROWS, STRIDE, DILATION, BACKWARD):
            for kw in tl.static_range(KW):
                if BACKWARD:
                    from_row, from_column = row + (PAD_H + ROWS - 1 - step), column + (PAD_W - kw * DILATION)
                    hit = (from_row >= 0) & (from_column >= 0)
                    if STRIDE > 1:
                        hit = hit & (from_row % STRIDE == 0) & (from_column % STRIDE == 0)
                        from_row, from_column = from_row // STRIDE, from_column // STRIDE
                else:
                    from_row = row * STRIDE + (step - PAD_H)
                    from_column = column * STRIDE + (kw * DILATION - PAD_W)
                    hit = (from_row >= 0) & (from_column >= 0)
                hit = hit & inside & (from_row < in_height) & (from_column < in_width)
                at = ((image * in_height + from_row) * in_width + from_column) * channels
                mask = hit[:, None] & known[None, :]
                x = tl.load(x_base + at[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)
                longer = ()
                for each in tl.static_range(ROWS):
                    if _tap(step, each, KH, ROWS, STRIDE, DILATION, BACKWARD) >= 0:
                        tap = _tap(step, each, KH, ROWS, STRIDE, DILATION, BACKWARD) * KW + kw
                        w = tl.load(filters + tap, mask=known, other=0.0).to(tl.float32)
                        longer = longer + (sums[each] + x * w[None, :],)  # noqa: RUF005
                    else:
                        longer = longer + (sums[each],)  # noqa: RUF005
                sums = longer
    place = y_ptr + client * (batch * out_height * out_width * channels) + channel[None, :]
    at = ((image * out_height + row) * out_width + column) * channels
    total = tl.zeros((COLUMNS, BLOCK), dtype=tl.float32)
    for each in tl.static_range(ROWS):
        y = sums[each].to(y_ptr.dtype.element_ty)
        mask = (inside & (row + each < out_height))[:, None] & known[None, :]
        tl.store(place + (at + each * out_width * channels)[:, None], y, mask=mask)
        total += y.to(tl.float32)  # what the batch norm will read, and 0 behind the last pixel
    if MOMENTS:
        count = ROWS * tl.minimum(batch * high * out_width - tile * COLUMNS, COLUMNS).to(tl.float32)
        mean = tl.sum(total, 0) / count
        squares = tl.zeros((COLUMNS, BLOCK), dtype=tl.float32)
        for each in tl.static_range(ROWS):
            away = sums[each].to(y_ptr.dtype.element_ty).to(tl.float32) - mean[None, :]
            squares += tl.where(inside[:, None], away * away, 0.0)
        part = part_ptr + (client * tiles + tile) * (2 * channels) + channel
        tl.store(part, mean, mask=known)
        tl.store(part + channels, tl.sum(squares, 0), mask=known)


@kernel(*_SIZES, "parts", "turns")
def _filter_kernel(
    x_ptr, dy_ptr, part_ptr, batch, in_height, in_width, out_height, out_width, words, parts, turns,
    KH: tl.constexpr, KW: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr, PAD_H: tl.constexpr,
    PAD_W: tl.constexpr, PIXELS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, WORD: tl.constexpr,
):  # fmt: skip
    """A share of the pixels' part of the gradient of filters, some taps at a time."""
    client = tl.program_id(1).to(tl.int64)
    channels = words * WORD
    split, channel = _block(channels, BLOCK)
    known = channel < channels
    total = batch * out_height * out_width
    x_base = x_ptr + client * (batch * in_height * in_width * channels) + channel[None, :]
    dy_base = dy_ptr + client * (total * channels) + channel[None, :]
    part = part_ptr + ((client * parts + split) * channels + channel) * (KH * KW)
    for first in tl.static_range(0, KH * KW, TAPS):
        sums = ()
        for _ in tl.static_range(first, min(first + TAPS, KH * KW)):
            sums = sums + (tl.zeros((PIXELS, BLOCK), dtype=tl.float32),)  # noqa: RUF005 (all that Triton knows)
        for turn in range(turns):
            pixel = (split * turns + turn) * PIXELS + tl.arange(0, PIXELS)
            column, row, image = pixel % out_width, pixel // out_width % out_height, pixel // (out_width * out_height)
            inside = pixel < total
            mask = inside[:, None] & known[None, :]
            dy = tl.load(dy_base + (pixel * channels)[:, None], mask=mask, other=0.0).to(tl.float32)
            longer = ()
            for tap in tl.static_range(first, min(first + TAPS, KH * KW)):
                from_row = row * STRIDE + (tap // KW * DILATION - PAD_H)
                from_column = column * STRIDE + (tap % KW * DILATION - PAD_W)
                hit = (from_row >= 0) & (from_row < in_height) & (from_column >= 0) & (from_column < in_width)
                at = ((image * in_height + from_row) * in_width + from_column) * channels
                x = tl.load(x_base + at[:, None], mask=(hit & inside)[:, None] & known[None, :], other=0.0)
                longer = longer + (sums[tap - first] + x.to(tl.float32) * dy,)  # noqa: RUF005
            sums = longer
        for tap in tl.static_range(first, min(first + TAPS, KH * KW)):
            tl.store(part + tap, tl.sum(sums[tap - first], 0), mask=known)


def _common(x: Tensor, shape: Depth) -> tuple[int, int, dict[str, Any]]:
    """How many blocks of channels there are, and words of them, and the constants that all kernels take."""
    channels = x.shape[-1]
    block, (count, word) = depth_block(channels, shape.kernel_h * shape.kernel_w), words(channels)
    constants = {**shape.constants, "BLOCK": block, "WORD": word, "num_warps": 4}
    return triton.cdiv(channels, block), count, constants


def run_depthwise(
    x: Tensor, w: Tensor, size: tuple[int, int], shape: Depth, *, backward: bool = False, moments: bool = False
) -> tuple[Tensor, Tensor]:
    """y of this height and width, and the moments of its tiles; x has the channel last, and `backward` it is dy.

    Clients' filters may lie apart, as views into a longer row.
    """
    clients, batch, height, width, channels = x.shape
    y = x.new_empty(clients, batch, *size, channels)
    rows = depth_rows(size[0])
    columns = DEPTH_PIXELS // rows
    tiles = triton.cdiv(batch * triton.cdiv(size[0], rows) * size[1], columns)
    parts = torch.empty((clients, tiles, 2, channels) if moments else (0,), dtype=torch.float32, device=x.device)
    blocks, count, constants = _common(x, shape)
    _depth_kernel[(tiles * blocks, clients)](
        x, w, y, parts, w.stride(0), batch, height, width, *size, count, tiles,
        BACKWARD=backward, MOMENTS=moments, COLUMNS=columns, ROWS=rows, **constants,
    )  # fmt: skip
    return y, parts


def run_filter_grad(x: Tensor, dy: Tensor, shape: Depth) -> Tensor:
    """(client, part, channel, height, width) in float32: their sum over the parts is the gradient of the filters."""
    clients, batch, height, width, channels = x.shape
    size = dy.shape[2:4]
    _, count, constants = _common(x, shape)
    cut = filter_cut(channels, shape.kernel_h * shape.kernel_w, batch * size[0] * size[1], clients)
    parts = torch.empty(
        clients, cut.parts, channels, shape.kernel_h, shape.kernel_w, dtype=torch.float32, device=x.device
    )
    _filter_kernel[(cut.parts * cut.blocks, clients)](
        x, dy, parts, batch, height, width, *size, count, cut.parts, cut.turns,
        PIXELS=FILTER_PIXELS, TAPS=DEPTH_TAPS, **constants,
    )  # fmt: skip
    return parts
