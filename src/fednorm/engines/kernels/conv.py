"""Triton kernels for convolutions of a stack of clients, with activations as (client, batch, height, width, channel).

cuDNN runs a convolution with weights per client as a grouped one, which is weak at the 16 to 64 channels of small
networks. Here a program computes a tile of output pixels of one client as a matrix product for each tap of the filter.
Weights stay as the model keeps them (client, out, in, height, width) in float32 and are rounded on load.
"""
# Triton reads annotations of constants at run time, so this file does without `from __future__ import annotations`.
# A jitted kernel is started by indexing it with its grid, which type checkers cannot know.
# pyright: reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _conv_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    batch,
    in_height,
    in_width,
    out_height,
    out_width,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    BACKWARD: tl.constexpr,
    PRECISION: tl.constexpr,
    PIXELS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """y = conv(x, w), or with BACKWARD the gradient of the input: there x is dy, IN are the filters' outputs."""
    client = tl.program_id(1)
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    total = batch * out_height * out_width
    column = pixel % out_width
    row = (pixel // out_width) % out_height
    image = pixel // (out_width * out_height)
    outs = tl.program_id(2) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    x_base = x_ptr + client.to(tl.int64) * (batch * in_height * in_width * IN)
    w_base = w_ptr + client.to(tl.int64) * (IN * OUT * KH * KW)
    acc = tl.zeros((PIXELS, BLOCK_OUT), dtype=tl.float32)
    for kh in tl.static_range(KH):
        for kw in tl.static_range(KW):
            if BACKWARD:
                up, left = row + PAD_H - kh, column + PAD_W - kw
                src_row, src_col = up // STRIDE, left // STRIDE
                hit = (up >= 0) & (left >= 0) & (up % STRIDE == 0) & (left % STRIDE == 0)
            else:
                src_row, src_col = row * STRIDE + kh - PAD_H, column * STRIDE + kw - PAD_W
                hit = (src_row >= 0) & (src_col >= 0)
            hit = hit & (src_row < in_height) & (src_col < in_width) & (pixel < total)
            place = ((image * in_height + src_row) * in_width + src_col) * IN
            for start in range(0, IN, BLOCK_IN):
                ins = start + tl.arange(0, BLOCK_IN)
                x = tl.load(x_base + place[:, None] + ins[None, :], mask=hit[:, None] & (ins < IN)[None, :], other=0.0)
                if BACKWARD:
                    w_at = (ins[:, None] * OUT + outs[None, :]) * (KH * KW)
                else:
                    w_at = (outs[None, :] * IN + ins[:, None]) * (KH * KW)
                w_mask = (ins < IN)[:, None] & (outs < OUT)[None, :]
                w = tl.load(w_base + w_at + kh * KW + kw, mask=w_mask, other=0.0)
                acc += tl.dot(x, w.to(x.dtype), input_precision=PRECISION)
    y_at = client.to(tl.int64) * (total * OUT) + pixel[:, None] * OUT + outs[None, :]
    tl.store(y_ptr + y_at, acc.to(y_ptr.dtype.element_ty), mask=(pixel < total)[:, None] & (outs < OUT)[None, :])


@triton.jit
def _weight_kernel(
    x_ptr,
    dy_ptr,
    part_ptr,
    batch,
    in_height,
    in_width,
    out_height,
    out_width,
    splits,
    clients,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    TURNS: tl.constexpr,
    PRECISION: tl.constexpr,
    PIXELS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """A share of the pixels' part of the gradient of one tap: x^T dy."""
    split = tl.program_id(0)
    client = tl.program_id(1)
    in_blocks: tl.constexpr = (IN + BLOCK_IN - 1) // BLOCK_IN
    out_blocks: tl.constexpr = (OUT + BLOCK_OUT - 1) // BLOCK_OUT
    place = tl.program_id(2)
    outs = (place % out_blocks) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    ins = ((place // out_blocks) % in_blocks) * BLOCK_IN + tl.arange(0, BLOCK_IN)
    tap = place // (out_blocks * in_blocks)
    kh, kw = tap // KW, tap % KW
    total = batch * out_height * out_width
    x_base = x_ptr + client.to(tl.int64) * (batch * in_height * in_width * IN)
    dy_base = dy_ptr + client.to(tl.int64) * (total * OUT)
    acc = tl.zeros((BLOCK_IN, BLOCK_OUT), dtype=tl.float32)
    for turn in range(TURNS):
        pixel = (turn * splits + split) * PIXELS + tl.arange(0, PIXELS)
        column = pixel % out_width
        row = (pixel // out_width) % out_height
        image = pixel // (out_width * out_height)
        src_row, src_col = row * STRIDE + kh - PAD_H, column * STRIDE + kw - PAD_W
        inside = pixel < total
        hit = (src_row >= 0) & (src_col >= 0) & (src_row < in_height) & (src_col < in_width) & inside
        at = ((image * in_height + src_row) * in_width + src_col) * IN
        x = tl.load(x_base + at[:, None] + ins[None, :], mask=hit[:, None] & (ins < IN)[None, :], other=0.0)
        dy_mask = inside[:, None] & (outs < OUT)[None, :]
        dy = tl.load(dy_base + pixel[:, None] * OUT + outs[None, :], mask=dy_mask, other=0.0)
        acc += tl.dot(tl.trans(x), dy, input_precision=PRECISION)
    base = (split * clients + client) * (OUT * IN * KH * KW)
    out_at = (outs[None, :] * IN + ins[:, None]) * (KH * KW) + tap
    tl.store(part_ptr + base + out_at, acc, mask=(ins < IN)[:, None] & (outs < OUT)[None, :])


def channels_last(x: Tensor) -> Tensor:
    """(client, batch, channel, height, width) as (client, batch, height, width, channel), contiguous."""
    return x.permute(0, 1, 3, 4, 2).contiguous()


def _block(channels: int) -> int:
    return min(64, max(16, triton.next_power_of_2(channels)))


def _precision() -> str:
    """What torch may do with float32 in convolutions, these may too."""
    return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"


def _launch(
    x: Tensor, w: Tensor, size: tuple[int, int], stride: int, padding: tuple[int, int], backward: bool
) -> Tensor:
    clients, outs, ins, kh, kw = w.shape
    if backward:
        outs, ins = ins, outs
    x = channels_last(x)
    _, batch, height, width, _ = x.shape
    y = x.new_empty(clients, batch, *size, outs)
    pixels = 128
    block_in, block_out = _block(ins), _block(outs)
    grid = (triton.cdiv(batch * size[0] * size[1], pixels), clients, triton.cdiv(outs, block_out))
    _conv_kernel[grid](
        x, w.contiguous(), y, batch, height, width, *size,
        IN=ins, OUT=outs, STRIDE=stride, PAD_H=padding[0], PAD_W=padding[1], KH=kh, KW=kw, BACKWARD=backward,
        PRECISION=_precision(), PIXELS=pixels, BLOCK_IN=block_in, BLOCK_OUT=block_out, num_warps=4,
    )  # fmt: skip
    return y.permute(0, 1, 4, 2, 3)


def conv_forward(x: Tensor, w: Tensor, stride: int, padding: tuple[int, int]) -> Tensor:
    """x (client, batch, in, h, w) with w (client, out, in, kh, kw) -> (client, batch, out, h', w')."""
    size = [(x.shape[3 + i] + 2 * padding[i] - w.shape[3 + i]) // stride + 1 for i in (0, 1)]
    return _launch(x, w, (size[0], size[1]), stride, padding, backward=False)


def conv_input_grad(dy: Tensor, w: Tensor, size: tuple[int, int], stride: int, padding: tuple[int, int]) -> Tensor:
    """The gradient of the input, whose height and width are `size`."""
    return _launch(dy, w, size, stride, padding, backward=True)


def conv_weight_grad(x: Tensor, dy: Tensor, kernel: tuple[int, int], stride: int, padding: tuple[int, int]) -> Tensor:
    """The gradient of the weights, in float32."""
    x, dy = channels_last(x), channels_last(dy)
    clients, batch, height, width, ins = x.shape
    out_height, out_width, outs = dy.shape[2:]
    pixels = 64
    block_in, block_out = _block(ins), _block(outs)
    places = kernel[0] * kernel[1] * triton.cdiv(ins, block_in) * triton.cdiv(outs, block_out)
    # Enough programs to fill the chip, and no fewer than a few tiles of pixels for each.
    tiles = triton.cdiv(batch * out_height * out_width, pixels)
    splits = max(1, min(tiles // 4, 1056 // (places * clients) + 1))
    parts = torch.empty(splits, clients, outs, ins, *kernel, dtype=torch.float32, device=x.device)
    _weight_kernel[(splits, clients, places)](
        x, dy, parts, batch, height, width, out_height, out_width, splits, clients,
        IN=ins, OUT=outs, STRIDE=stride, PAD_H=padding[0], PAD_W=padding[1], KH=kernel[0], KW=kernel[1],
        TURNS=triton.cdiv(tiles, splits), PRECISION=_precision(), PIXELS=pixels,
        BLOCK_IN=block_in, BLOCK_OUT=block_out, num_warps=4,
    )  # fmt: skip
    return parts.sum(0) if splits > 1 else parts[0]
