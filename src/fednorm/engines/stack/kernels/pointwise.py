"""Triton kernels for convolutions of a stack of clients by filters of one pixel: a product of matrices for each client.

There are no taps to look for, and the numbers of channels are no constants, so the many such layers of a network, which
differ in little else, share a few kernels.
"""
# Triton reads annotations of constants at run time, so this file does without `from __future__ import annotations`.

import torch
import triton
import triton.language as tl
from torch import Tensor

from fednorm.engines.stack.kernels.launch import kernel
from fednorm.engines.stack.kernels.tiles import Cut, Tile, words


@triton.jit
def finish(
    acc, pixel, tile, channel, client, total, tiles, OUT, bias_ptr, bias_stride, add_ptr, y_ptr, part_ptr,
    BIAS: tl.constexpr, ADD: tl.constexpr, RELU: tl.constexpr, MOMENTS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Write a tile of y (client, pixel, channel), with what follows the product, and its moments."""
    y_at = client * (total * OUT) + pixel[:, None] * OUT + channel[None, :]
    inside = (pixel < total)[:, None] & (channel < OUT)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + client * bias_stride + channel, mask=channel < OUT, other=0.0)[None, :]
    if ADD:
        acc += tl.load(add_ptr + y_at, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        acc = tl.maximum(acc, 0.0, propagate_nan=tl.PropagateNan.ALL)
    y = acc.to(y_ptr.dtype.element_ty)
    if MOMENTS and channel.shape[0] >= 64:
        # Nothing is read here. But the compiler arranges what follows a read as that is arranged: a thread has whole
        # words of many pixels, and its sums over pixels are its own. As the product leaves them, a pixel's channels lie
        # in few threads and its sums are exchanged, four times as often for 128 channels.
        y += tl.load(y_ptr + y_at, mask=inside & (pixel < 0)[:, None], other=0.0)
    tl.store(y_ptr + y_at, y, mask=inside)
    if MOMENTS:
        seen = tl.where((pixel < total)[:, None], y.to(tl.float32), 0.0)  # what the batch norm will read
        mean = tl.sum(seen, 0) / tl.minimum(total - tile * PIXELS, PIXELS).to(tl.float32)
        away = tl.where((pixel < total)[:, None], seen - mean[None, :], 0.0)
        base = part_ptr + (client * tiles + tile) * (2 * OUT) + channel
        tl.store(base, mean, mask=channel < OUT)
        tl.store(base + OUT, tl.sum(away * away, 0), mask=channel < OUT)


@kernel("total", "in_words", "out_words", "tiles")
def _point_kernel(
    x_ptr, w_ptr, bias_ptr, add_ptr, y_ptr, part_ptr, w_stride, bias_stride, total, in_words, out_words, tiles,
    BACKWARD: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, RELU: tl.constexpr, MOMENTS: tl.constexpr,
    PRECISION: tl.constexpr, IN_WORD: tl.constexpr, OUT_WORD: tl.constexpr, PIXELS: tl.constexpr, TERMS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):  # fmt: skip
    """y = x w^T for weights (out, in), or with BACKWARD the gradient of the input: there x is dy, and y = x w."""
    tile = tl.program_id(0)
    client = tl.program_id(1).to(tl.int64)
    ins, outs = in_words * IN_WORD, out_words * OUT_WORD
    pixel = tile * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(2) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    x_base = x_ptr + client * (total * ins)
    w_base = w_ptr + client * w_stride
    acc = tl.zeros((PIXELS, BLOCK_OUT), dtype=tl.float32)
    for start in range(0, ins, TERMS):
        term = start + tl.arange(0, TERMS)
        x_mask = (pixel < total)[:, None] & (term < ins)[None, :]
        x = tl.load(x_base + pixel[:, None] * ins + term[None, :], mask=x_mask, other=0.0)
        w_at = term[:, None] * outs + channel[None, :] if BACKWARD else channel[None, :] * ins + term[:, None]
        w = tl.load(w_base + w_at, mask=(term < ins)[:, None] & (channel < outs)[None, :], other=0.0)
        acc = tl.dot(x, w.to(x.dtype), acc, input_precision=PRECISION)
    finish(
        acc, pixel, tile, channel, client, total, tiles, outs, bias_ptr, bias_stride, add_ptr, y_ptr, part_ptr,
        BIAS, ADD, RELU, MOMENTS, PIXELS,
    )  # fmt: skip


@kernel("total", "in_words", "out_words", "turns")
def _weight_kernel(
    x_ptr, dy_ptr, part_ptr, total, in_words, out_words, turns,
    PRECISION: tl.constexpr, IN_WORD: tl.constexpr, OUT_WORD: tl.constexpr, PIXELS: tl.constexpr, TERMS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):  # fmt: skip
    """A share of the pixels' part of the gradient of some weights: x^T dy."""
    split = tl.program_id(0)
    client = tl.program_id(1).to(tl.int64)
    ins, outs = in_words * IN_WORD, out_words * OUT_WORD
    blocks = tl.cdiv(outs, BLOCK_OUT)
    channel = tl.program_id(2) % blocks * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    term = tl.program_id(2) // blocks * TERMS + tl.arange(0, TERMS)
    x_base = x_ptr + client * (total * ins) + term[None, :]
    dy_base = dy_ptr + client * (total * outs) + channel[None, :]
    acc = tl.zeros((TERMS, BLOCK_OUT), dtype=tl.float32)
    for turn in range(turns):
        pixel = (split * turns + turn) * PIXELS + tl.arange(0, PIXELS)
        inside = (pixel < total)[:, None]
        x = tl.load(x_base + pixel[:, None] * ins, mask=inside & (term < ins)[None, :], other=0.0)
        dy = tl.load(dy_base + pixel[:, None] * outs, mask=inside & (channel < outs)[None, :], other=0.0)
        acc = tl.dot(tl.trans(x), dy, acc, input_precision=PRECISION)
    base = part_ptr + (client * tl.num_programs(0) + split) * (outs * ins)
    known = (term < ins)[:, None] & (channel < outs)[None, :]
    tl.store(base + channel[None, :] * ins + term[:, None], acc, mask=known)


def precision() -> str:
    """What torch may do with float32 in convolutions, these may too."""
    return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"


def run_point(
    x: Tensor, w: Tensor, y: Tensor, parts: Tensor, tile: Tile, *, backward: bool, bias: Tensor | None,
    addend: Tensor | None, relu: bool,
) -> None:  # fmt: skip
    """Fill y, and `parts` with the moments of its tiles if it has room for them."""
    clients, ins, outs = len(x), x.shape[-1], y.shape[-1]
    total = y[0].numel() // outs
    tiles = triton.cdiv(total, tile.pixels)
    (in_words, in_word), (out_words, out_word) = words(ins), words(outs)
    _point_kernel[(tiles, clients, triton.cdiv(outs, tile.outs))](
        x, w, w if bias is None else bias, y if addend is None else addend, y, parts,
        w.stride(0), 0 if bias is None else bias.stride(0), total, in_words, out_words, tiles,
        BACKWARD=backward, BIAS=bias is not None, ADD=addend is not None, RELU=relu, MOMENTS=parts.numel() > 0,
        PRECISION=precision(), IN_WORD=in_word, OUT_WORD=out_word, PIXELS=tile.pixels, TERMS=tile.terms,
        BLOCK_OUT=tile.outs, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def run_point_weight_grad(x: Tensor, dy: Tensor, parts: Tensor, tile: Tile, cut: Cut) -> None:
    """Fill `parts` (client, part, out, ..., in) with what each share of the pixels adds to the gradient."""
    ins, outs = x.shape[-1], dy.shape[-1]
    (in_words, in_word), (out_words, out_word) = words(ins), words(outs)
    _weight_kernel[(cut.parts, len(x), cut.blocks)](
        x, dy, parts, dy[0].numel() // outs, in_words, out_words, cut.turns,
        PRECISION=precision(), IN_WORD=in_word, OUT_WORD=out_word, PIXELS=tile.pixels, TERMS=tile.terms,
        BLOCK_OUT=tile.outs, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
