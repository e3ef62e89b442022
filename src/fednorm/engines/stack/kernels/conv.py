"""Triton kernels for convolutions of a stack of clients, with activations as (client, batch, height, width, channel).

cuDNN runs a convolution with weights per client as a grouped one, which is weak at the 16 to 64 channels of small
networks. Here a program computes a tile of output pixels of one client as a product over taps and channels together, so
that a layer of few channels still has long products. Weights are (client, out, height, width, in), float32, and are
rounded on load.
"""
# Triton reads annotations of constants at run time, so this file does without `from __future__ import annotations`.

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fednorm.engines.stack.kernels.boxes import (
    box_of,
    box_tile,
    boxes_fit,
    fetched,
    run_box_conv,
    run_box_weight_grad,
)
from fednorm.engines.stack.kernels.launch import kernel
from fednorm.engines.stack.kernels.pointwise import finish, precision, run_point, run_point_weight_grad
from fednorm.engines.stack.kernels.tiles import conv_tile, weight_cut


class Shape(NamedTuple):
    """The static part of a convolution."""

    stride: int
    pad_h: int
    pad_w: int
    kernel_h: int
    kernel_w: int

    @property
    def is_pointwise(self) -> bool:
        """Whether each pixel meets but the one of its own place."""
        return self == (1, 0, 0, 1, 1)


@triton.jit
def _source(
    row, column, kh, kw, in_height, in_width,
    STRIDE: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Where in an image the pixel lies that a tap of an output pixel reads, and whether there is one."""
    if BACKWARD:
        up, left = row + (PAD_H - kh), column + (PAD_W - kw)
        src_row, src_col = up // STRIDE, left // STRIDE
        hit = (up >= 0) & (left >= 0)
        if STRIDE > 1:
            hit = hit & (up % STRIDE == 0) & (left % STRIDE == 0)
    else:
        src_row, src_col = row * STRIDE + (kh - PAD_H), column * STRIDE + (kw - PAD_W)
        hit = (src_row >= 0) & (src_col >= 0)
    return src_row * in_width + src_col, hit & (src_row < in_height) & (src_col < in_width)


@kernel("batch", "tiles")  # one kernel for batches of all sizes
def _conv_kernel(
    x_ptr, w_ptr, bias_ptr, add_ptr, y_ptr, part_ptr, w_stride, bias_stride, batch,
    in_height, in_width, out_height, out_width, tiles,
    IN: tl.constexpr, OUT: tl.constexpr, STRIDE: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, BACKWARD: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    RELU: tl.constexpr, MOMENTS: tl.constexpr, PRECISION: tl.constexpr, HALVED: tl.constexpr, GATHERED: tl.constexpr,
    PIXELS: tl.constexpr, TERMS: tl.constexpr, BLOCK_OUT: tl.constexpr,
):  # fmt: skip
    """y = conv(x, w), or with BACKWARD the gradient of the input: there x is dy, IN are the filters' outputs.

    All terms of a turn belong to one tap, so that a pixel has one place to read from, not one for each term; the last
    turn of a tap may have terms too many. Of very few channels (GATHERED) a turn has those of several taps.
    BIAS adds a number to each channel, ADD a tensor of y's shape; RELU follows. MOMENTS leaves mean and squared
    deviations of each tile's pixels, for a batch norm. Of a step of 2 backward, a pixel meets every other tap in
    either direction: HALVED takes the pixels of even and odd rows and columns apart, each with the taps it meets.
    """
    tile = tl.program_id(0)
    client = tl.program_id(1).to(tl.int64)
    total = batch * out_height * out_width
    depth: tl.constexpr = IN if GATHERED else (IN + TERMS - 1) // TERMS * TERMS
    if HALVED:
        kind = tile // (tiles // 4)
        wide = out_width // 2
        index = (tile % (tiles // 4)) * PIXELS + tl.arange(0, PIXELS)
        column = index % wide * 2 + kind % 2
        row = index // wide % (out_height // 2) * 2 + kind // 2
        image = index // (wide * (out_height // 2))
        pixel = tl.where(image < batch, (image * out_height + row) * out_width + column, total)
        first_h, first_w = (kind // 2 + PAD_H) % 2, (kind % 2 + PAD_W) % 2
        taps_w = (KW + 1 - first_w) // 2
        turns = (KH + 1 - first_h) // 2 * taps_w * depth
    else:
        pixel = tile * PIXELS + tl.arange(0, PIXELS)
        column = pixel % out_width
        row = (pixel // out_width) % out_height
        image = pixel // (out_width * out_height)
        first_h, first_w, taps_w, turns = 0, 0, KW, KH * KW * depth
    outs = tl.program_id(2) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    x_base = x_ptr + client * (batch * in_height * in_width * IN)
    w_base = w_ptr + client * w_stride
    acc = tl.zeros((PIXELS, BLOCK_OUT), dtype=tl.float32)
    for start in range(0, turns, TERMS):
        if GATHERED:
            term = start + tl.arange(0, TERMS)
            tap, channel = (term // IN)[:, None], term % IN
            known = (term < KH * KW * IN)[:, None]
            place, hit = _source(
                row[:, None], column[:, None], (term // IN // KW)[None, :], (term // IN % KW)[None, :],
                in_height, in_width, STRIDE, PAD_H, PAD_W, BACKWARD,
            )  # fmt: skip
            at = (image[:, None] * (in_height * in_width) + place) * IN + channel[None, :]
            hit = hit & (pixel < total)[:, None] & (term < KH * KW * IN)[None, :]
        else:
            tap, channel = start // depth, tl.multiple_of(start % depth, TERMS) + tl.arange(0, TERMS)
            known = (channel < IN)[:, None]
            if HALVED:
                tap = (first_h + tap // taps_w * 2) * KW + first_w + tap % taps_w * 2
            place, hit = _source(
                row, column, tap // KW, tap % KW, in_height, in_width, STRIDE, PAD_H, PAD_W, BACKWARD
            )  # fmt: skip
            at = ((image * (in_height * in_width) + place) * IN)[:, None] + channel[None, :]
            hit = (hit & (pixel < total))[:, None]
            if depth != IN:
                hit = hit & (channel < IN)[None, :]
        x = tl.load(x_base + at, mask=hit, other=0.0)
        if BACKWARD:
            w_at = channel[:, None] * (KH * KW * OUT) + tap * OUT + outs[None, :]
        else:
            w_at = outs[None, :] * (KH * KW * IN) + (tap * IN + channel[:, None])
        if not GATHERED and depth == IN and OUT % BLOCK_OUT == 0:
            w = tl.load(w_base + w_at)
        else:
            w = tl.load(w_base + w_at, mask=known & (outs < OUT)[None, :], other=0.0)
        acc = tl.dot(x, w.to(x.dtype), acc, input_precision=PRECISION)
    finish(
        acc, pixel, tile, outs, client, total, tiles, OUT, bias_ptr, bias_stride, add_ptr, y_ptr, part_ptr,
        BIAS, ADD, RELU, MOMENTS, PIXELS,
    )  # fmt: skip


@kernel("batch")
def _weight_kernel(
    x_ptr, dy_ptr, part_ptr, batch, in_height, in_width, out_height, out_width,
    IN: tl.constexpr, OUT: tl.constexpr, STRIDE: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, TURNS: tl.constexpr, PRECISION: tl.constexpr, GATHERED: tl.constexpr,
    PIXELS: tl.constexpr, TERMS: tl.constexpr, BLOCK_OUT: tl.constexpr,
):  # fmt: skip
    """A share of the pixels' part of the gradient of some taps and channels: x^T dy.

    As forward, the terms of a program belong to one tap, of very few channels to several.
    """
    split = tl.program_id(0)
    client = tl.program_id(1).to(tl.int64)
    out_blocks: tl.constexpr = (OUT + BLOCK_OUT - 1) // BLOCK_OUT
    outs = (tl.program_id(2) % out_blocks) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    if GATHERED:
        term = (tl.program_id(2) // out_blocks) * TERMS + tl.arange(0, TERMS)
        tap, channel, known = term // IN, term % IN, term < KH * KW * IN
    else:
        blocks: tl.constexpr = (IN + TERMS - 1) // TERMS
        tap = tl.program_id(2) // out_blocks // blocks
        channel = (tl.program_id(2) // out_blocks % blocks) * TERMS + tl.arange(0, TERMS)
        term, known = tap * IN + channel, channel < IN
    total = batch * out_height * out_width
    x_base = x_ptr + client * (batch * in_height * in_width * IN)
    dy_base = dy_ptr + client * (total * OUT)
    acc = tl.zeros((TERMS, BLOCK_OUT), dtype=tl.float32)
    for turn in range(TURNS):
        pixel = (split * TURNS + turn) * PIXELS + tl.arange(0, PIXELS)
        column = pixel % out_width
        row = (pixel // out_width) % out_height
        image = pixel // (out_width * out_height)
        if GATHERED:
            place, hit = _source(
                row[:, None], column[:, None], (tap // KW)[None, :], (tap % KW)[None, :],
                in_height, in_width, STRIDE, PAD_H, PAD_W, False,
            )  # fmt: skip
            at = (image[:, None] * (in_height * in_width) + place) * IN + channel[None, :]
            hit = hit & (pixel < total)[:, None] & known[None, :]
        else:
            place, hit = _source(row, column, tap // KW, tap % KW, in_height, in_width, STRIDE, PAD_H, PAD_W, False)
            at = ((image * (in_height * in_width) + place) * IN)[:, None] + channel[None, :]
            hit = (hit & (pixel < total))[:, None]
            if IN % TERMS != 0:
                hit = hit & known[None, :]
        x = tl.load(x_base + at, mask=hit, other=0.0)
        dy_mask = (pixel < total)[:, None] & (outs < OUT)[None, :]
        dy = tl.load(dy_base + pixel[:, None] * OUT + outs[None, :], mask=dy_mask, other=0.0)
        acc = tl.dot(tl.trans(x), dy, acc, input_precision=PRECISION)
    base = (client * tl.num_programs(0) + split) * (OUT * IN * KH * KW)
    out_at = outs[None, :] * (KH * KW * IN) + term[:, None]
    tl.store(part_ptr + base + out_at, acc, mask=known[:, None] & (outs < OUT)[None, :])


def run_conv(
    x: Tensor, w: Tensor, size: tuple[int, int], shape: Shape, *, backward: bool = False,
    bias: Tensor | None = None, addend: Tensor | None = None, relu: bool = False, moments: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y and the moments of its tiles; x and w have the channel last, `size` is height and width of y.

    Clients' filters and biases may lie apart, as views into a longer row.
    """
    clients, filters, _, _, ins = w.shape
    outs, ins = (ins, filters) if backward else (filters, ins)
    _, batch, height, width, _ = x.shape
    y = x.new_empty(clients, batch, *size, outs)
    pixels, taps = batch * size[0] * size[1], shape.kernel_h * shape.kernel_w
    tile = conv_tile(ins, outs, taps, pixels, clients, x.dtype == torch.float32)
    gathered = tile.gathers(ins)
    halved = backward and shape.stride == 2 and not gathered and size[0] % 2 == size[1] % 2 == 0
    share = 4 if halved else 1
    tiles = share * triton.cdiv(pixels // share, tile.pixels)
    parts = torch.empty((clients, tiles, 2, outs) if moments else (0,), dtype=torch.float32, device=x.device)
    if shape.is_pointwise:
        run_point(x, w, y, parts, tile, backward=backward, bias=bias, addend=addend, relu=relu)
        return y, parts
    box = box_of(tile, ins, *size)
    if box and boxes_fit(shape.stride, x, filters=w):
        given = x, w, y, parts, box_tile(tile, outs, tiles * clients), box, (shape.pad_h, shape.pad_w)
        if fetched(partial(run_box_conv, *given, backward=backward, bias=bias, addend=addend, relu=relu)):
            return y, parts
    _conv_kernel[(tiles, clients, triton.cdiv(outs, tile.outs))](
        x, w, w if bias is None else bias, y if addend is None else addend, y, parts,
        w.stride(0), 0 if bias is None else bias.stride(0), batch, height, width, *size, tiles,
        IN=ins, OUT=outs, STRIDE=shape.stride, PAD_H=shape.pad_h, PAD_W=shape.pad_w, KH=shape.kernel_h,
        KW=shape.kernel_w, BACKWARD=backward, BIAS=bias is not None, ADD=addend is not None, RELU=relu,
        MOMENTS=moments, PRECISION=precision(), HALVED=halved, GATHERED=gathered, PIXELS=tile.pixels,
        TERMS=tile.terms, BLOCK_OUT=tile.outs, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y, parts


def run_weight_grad(x: Tensor, dy: Tensor, shape: Shape) -> Tensor:
    """(client, part, out, height, width, in) in float32: their sum over the parts is the gradient of the weights."""
    clients, batch, height, width, ins = x.shape
    out_height, out_width, outs = dy.shape[2:]
    taps, pixels = shape.kernel_h * shape.kernel_w, batch * out_height * out_width
    tile, cut = weight_cut(ins, outs, taps, pixels, clients, x.dtype == torch.float32)
    size = shape.kernel_h, shape.kernel_w, ins
    parts = torch.empty(clients, cut.parts, outs, *size, dtype=torch.float32, device=x.device)
    if shape.is_pointwise:
        run_point_weight_grad(x, dy, parts, tile, cut)
        return parts
    box = box_of(tile, ins, out_height, out_width)
    if box and boxes_fit(shape.stride, x, dy):
        given = x, dy, parts, tile, cut, box, (shape.pad_h, shape.pad_w)
        if fetched(partial(run_box_weight_grad, *given)):
            return parts
    stages = tile.stages if tile.terms <= 64 else 2  # what fits into the 99 KB of a consumer's GPU
    _weight_kernel[(cut.parts, clients, cut.blocks)](
        x, dy, parts, batch, height, width, out_height, out_width,
        IN=ins, OUT=outs, STRIDE=shape.stride, PAD_H=shape.pad_h, PAD_W=shape.pad_w, KH=shape.kernel_h,
        KW=shape.kernel_w, TURNS=cut.turns, PRECISION=precision(), GATHERED=tile.gathers(ins), PIXELS=tile.pixels,
        TERMS=tile.terms, BLOCK_OUT=tile.outs, num_warps=tile.warps, num_stages=stages,
    )  # fmt: skip
    return parts
