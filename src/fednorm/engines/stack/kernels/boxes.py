"""Triton kernels for convolutions whose pixels a GPU fetches as boxes (rows of images, by its own unit for that).

They do what those in `conv` do, for steps of 1, channels that fill turns and images as wide as a power of 2. A tile of
pixels is a box of the output, and what a tap reads is the same box, moved: what lies beyond an image comes as zeros.
So no thread calculates where anything lies. Boxes are put into shared memory, and of 64 channels or more products are
taken from there; of fewer, pixels go by way of registers.
"""
# Triton reads annotations of constants at run time, so this file does without `from __future__ import annotations`.

import sys
from collections.abc import Callable, Sequence
from math import prod
from threading import Event
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from fednorm.engines.stack.kernels.launch import kernel
from fednorm.engines.stack.kernels.ops import INTERPRETED, SIDE_BY_SIDE
from fednorm.engines.stack.kernels.pointwise import finish
from fednorm.engines.stack.kernels.tiles import Cut, Tile, power_of_2
from fednorm.errors import first_line

_ARCH = 90
"""The first GPUs that fetch boxes."""
_BYTES = 16
"""What begins and steps of a box are multiples of."""
_CHANNELS = 32
"""With fewer, boxes are fetched in so small pieces that threads are quicker."""
_PROGRAMS = 110
"""that are worth having: a GPU of this kind plays 132 at a time."""
_MANY = tl.constexpr(64)
"""From so many channels on a product is right^T left^T, filters first: boxes of several rows that are the left part, of
which four warps take 64 rows at once, Triton reads into registers before, and never those that are the right part."""
_GIVEN_UP = Event()
"""Set once a kernel of boxes has failed in this process."""


class Box(NamedTuple):
    """A tile of pixels: whole rows, of one image or of whole images."""

    images: int
    rows: int


def box_of(tile: Tile, ins: int, height: int, width: int) -> Box | None:
    """The box that a tile's pixels of such images are; None where they are none, or are read as quickly otherwise.

    >>> tiles = [Tile(pixels, 64, 64, 4, 3) for pixels in (64, 128)]
    >>> [box_of(tiles[1], 64, size, size) for size in (32, 8, 28)]
    [Box(images=1, rows=4), Box(images=2, rows=8), None]
    >>> [box_of(tile, 64, 12, 16) for tile in tiles]
    [Box(images=1, rows=4), None]
    """
    if ins < _CHANNELS or ins % tile.terms or width > tile.pixels or width != power_of_2(width):
        return None
    rows = tile.pixels // width
    if rows < height:
        return Box(1, rows) if height % rows == 0 else None
    return Box(rows // height, height) if rows % height == 0 else None


def box_tile(tile: Tile, outs: int, tiles: int) -> Tile:
    """The cut of a convolution of so many tiles of pixels, of all clients: of many channels each program has more.

    >>> box_tile(Tile(128, 128, 64, 4, 3), outs=512, tiles=60)
    Tile(pixels=128, outs=256, terms=64, warps=8, stages=3)
    """
    many = tile.pixels == tile.outs == 128 and outs % 256 == 0 and tiles * outs // 256 >= _PROGRAMS
    return tile._replace(outs=256, warps=8, stages=3) if many else tile


def boxes_fit(stride: int, *images: Tensor, filters: Tensor | None = None) -> bool:
    """Whether a convolution with this step, of these tensors with the channel last, can be fetched as boxes."""
    if stride != 1 or _GIVEN_UP.is_set() or not _fetches():
        return False
    whole = all(each.is_contiguous() and _is_laid(each) for each in images)
    return whole and (filters is None or _is_laid(filters))


def fetched(launch: Callable[[], None]) -> bool:
    """Whether a launch with boxes could be made; the first that could not is told of, and no other is tried.

    While a graph is captured it fails as any launch does: what was recorded of it would be played. Kernels made side by
    side may fail for no reason, so what was tried there decides nothing.
    """
    try:
        launch()
    except Exception as error:  # a driver that refuses boxes, too little memory, Triton's compiler: of many types
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise
        if not SIDE_BY_SIDE.get() and not _GIVEN_UP.is_set():
            _GIVEN_UP.set()
            why = first_line(error)
            print(f"stacked engine: convolutions take longer than they could, boxes failed ({why})", file=sys.stderr)
        return False
    return True


def _fetches() -> bool:
    if INTERPRETED:
        return False
    target = driver.active.get_current_target()
    return target.backend == "cuda" and target.arch >= _ARCH


def _is_laid(tensor: Tensor) -> bool:
    """Whether numbers are narrow, and lie as boxes are fetched from: those of a client in one piece, clients apart."""
    own = tensor[0]
    apart = own.numel() if _is_one(tensor) else tensor.stride(0)
    places = tensor.data_ptr(), apart * tensor.itemsize, tensor.shape[-1] * tensor.itemsize
    narrow = tensor.dtype == torch.bfloat16
    return narrow and own.is_contiguous() and apart >= own.numel() and all(each % _BYTES == 0 for each in places)


def _is_one(tensor: Tensor) -> bool:
    """Whether there are the numbers of one client alone, though others may share them."""
    return len(tensor) == 1 or tensor.stride(0) == 0


def _boxes(tensor: Tensor, shape: Sequence[int], *block: int) -> TensorDescriptor:
    """Boxes of tensors of this shape, one for each client, or one for all.

    A unit that fetches boxes wants each step to be as long as what lies within it, and multiples of 16 bytes. Torch's
    own are 0 where clients share their numbers, and may be anything where there is but one of something.
    """
    steps = [prod(shape[place:]) for place in range(len(shape) + 1)]
    if _is_one(tensor):
        return TensorDescriptor(tensor, [1, *shape], steps, [1, *block])
    return TensorDescriptor(tensor, [len(tensor), *shape], [tensor.stride(0), *steps[1:]], [1, *block])


@triton.jit
def _added(acc, left, right, TURNED: tl.constexpr):
    """acc + left right, or TURNED acc + (left right)^T."""
    return tl.dot(right.T, left.T, acc) if TURNED else tl.dot(left, right, acc)


@kernel("own_filters", "total", "tiles")
def _conv_kernel(
    x_boxes, w_boxes, bias_ptr, add_ptr, y_ptr, part_ptr, own_filters, bias_stride, total, tiles,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, PAD_H: tl.constexpr,
    PAD_W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, BACKWARD: tl.constexpr, BIAS: tl.constexpr,
    ADD: tl.constexpr, RELU: tl.constexpr, MOMENTS: tl.constexpr, IMAGES: tl.constexpr, ROWS: tl.constexpr,
    TERMS: tl.constexpr, BLOCK_OUT: tl.constexpr,
):  # fmt: skip
    """y = conv(x, w), or with BACKWARD the gradient of the input: there x is dy, IN are the filters' outputs.

    Clients have filters of their own (own_filters is 1) or all the same (0).
    """
    PIXELS: tl.constexpr = IMAGES * ROWS * WIDTH
    tile, client = tl.program_id(0), tl.program_id(1)
    first, out = tile * PIXELS, tl.program_id(2) * BLOCK_OUT
    image, row = first // (HEIGHT * WIDTH), first % (HEIGHT * WIDTH) // WIDTH
    TURNED: tl.constexpr = BLOCK_OUT >= _MANY
    acc = tl.zeros((BLOCK_OUT, PIXELS) if TURNED else (PIXELS, BLOCK_OUT), dtype=tl.float32)
    for start in range(0, KH * KW * IN, TERMS):
        tap, channel = start // IN, start % IN
        down, right = tap // KW - PAD_H, tap % KW - PAD_W
        if BACKWARD:
            x = x_boxes.load([client, image, row - down, -right, channel])
            w = w_boxes.load([client * own_filters, channel, tap * OUT + out]).reshape(TERMS, BLOCK_OUT)
        else:
            x = x_boxes.load([client, image, row + down, right, channel])
            w = w_boxes.load([client * own_filters, out, start]).reshape(BLOCK_OUT, TERMS).T
        acc = _added(acc, x.reshape(PIXELS, TERMS), w, TURNED)
    acc = acc.T if TURNED else acc
    pixel, outs = first + tl.arange(0, PIXELS), out + tl.arange(0, BLOCK_OUT)
    finish(
        acc, pixel, tile, outs, client.to(tl.int64), total, tiles, OUT, bias_ptr, bias_stride, add_ptr, y_ptr, part_ptr,
        BIAS, ADD, RELU, MOMENTS, PIXELS,
    )  # fmt: skip


@kernel("turns")
def _weight_kernel(
    x_boxes, dy_boxes, part_ptr, turns,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, PAD_H: tl.constexpr,
    PAD_W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, IMAGES: tl.constexpr, ROWS: tl.constexpr,
    TERMS: tl.constexpr, BLOCK_OUT: tl.constexpr,
):  # fmt: skip
    """A share of the pixels' part of the gradient of some channels of a tap: x^T dy."""
    PIXELS: tl.constexpr = IMAGES * ROWS * WIDTH
    split, client = tl.program_id(0), tl.program_id(1)
    out_blocks: tl.constexpr = (OUT + BLOCK_OUT - 1) // BLOCK_OUT
    out, block = tl.program_id(2) % out_blocks * BLOCK_OUT, tl.program_id(2) // out_blocks
    tap, channel = block // (IN // TERMS), block % (IN // TERMS) * TERMS
    TURNED: tl.constexpr = BLOCK_OUT >= _MANY
    acc = tl.zeros((BLOCK_OUT, TERMS) if TURNED else (TERMS, BLOCK_OUT), dtype=tl.float32)
    for turn in range(turns):
        first = (split * turns + turn) * PIXELS
        image, row = first // (HEIGHT * WIDTH), first % (HEIGHT * WIDTH) // WIDTH
        x = x_boxes.load([client, image, row + tap // KW - PAD_H, tap % KW - PAD_W, channel])
        dy = dy_boxes.load([client, first, out]).reshape(PIXELS, BLOCK_OUT)
        acc = _added(acc, x.reshape(PIXELS, TERMS).T, dy, TURNED)
    acc = acc.T if TURNED else acc
    term, outs = tap * IN + channel + tl.arange(0, TERMS), out + tl.arange(0, BLOCK_OUT)
    base = (client.to(tl.int64) * tl.num_programs(0) + split) * (OUT * IN * KH * KW)
    tl.store(part_ptr + base + outs[None, :] * (KH * KW * IN) + term[:, None], acc, mask=(outs < OUT)[None, :])


def run_box_conv(
    x: Tensor, w: Tensor, y: Tensor, parts: Tensor, tile: Tile, box: Box, padding: Sequence[int], *,
    backward: bool = False, bias: Tensor | None = None, addend: Tensor | None = None, relu: bool = False,
) -> None:  # fmt: skip
    """Write y and the moments of its tiles; x and w have the channel last."""
    clients, filters, kh, kw, inner = w.shape
    ins, outs = x.shape[-1], y.shape[-1]
    _, batch, height, width, _ = y.shape
    total = batch * height * width
    tiles = triton.cdiv(total, tile.pixels)
    block = (tile.terms, tile.outs) if backward else (tile.outs, tile.terms)
    _conv_kernel[(tiles, clients, triton.cdiv(outs, tile.outs))](
        _boxes(x, x.shape[1:], *box, width, tile.terms), _boxes(w, (filters, kh * kw * inner), *block),
        w if bias is None else bias, y if addend is None else addend, y, parts, int(not _is_one(w)),
        0 if bias is None else bias.stride(0), total, tiles,
        HEIGHT=height, WIDTH=width, IN=ins, OUT=outs, PAD_H=padding[0], PAD_W=padding[1], KH=kh, KW=kw,
        BACKWARD=backward, BIAS=bias is not None, ADD=addend is not None, RELU=relu, MOMENTS=parts.numel() > 0,
        IMAGES=box.images, ROWS=box.rows, TERMS=tile.terms, BLOCK_OUT=tile.outs,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def run_box_weight_grad(
    x: Tensor, dy: Tensor, parts: Tensor, tile: Tile, cut: Cut, box: Box, padding: Sequence[int]
) -> None:
    """Write each part of (client, part, out, height, width, in)."""
    clients, shares, outs, kh, kw, ins = parts.shape
    _, batch, height, width, _ = dy.shape
    _weight_kernel[(shares, clients, cut.blocks)](
        _boxes(x, x.shape[1:], *box, width, tile.terms),
        _boxes(dy, (batch * height * width, outs), tile.pixels, tile.outs), parts, cut.turns,
        HEIGHT=height, WIDTH=width, IN=ins, OUT=outs, PAD_H=padding[0], PAD_W=padding[1], KH=kh, KW=kw,
        IMAGES=box.images, ROWS=box.rows, TERMS=tile.terms, BLOCK_OUT=tile.outs,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
