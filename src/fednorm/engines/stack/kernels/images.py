"""A Triton kernel that takes images from the pool, moves their pixels and scales them, for a whole stack at once.

Done by torch's operators this is some forty small launches, as many as a step's convolutions have. The steps of an
augmentation (`fednorm.data.augment`) are maps in whole numbers, so the result is the same.
"""
# Triton reads annotations of constants at run time, so this file does without `from __future__ import annotations`.

import torch
import triton
import triton.language as tl
from torch import Tensor

from fednorm.engines.stack.kernels.launch import kernel

_PIXELS = 256
_FRACTION = tl.constexpr(16)


@kernel()
def _images_kernel(
    pool_ptr, rows_ptr, drawn_ptr, plan_ptr, scale_ptr, out_ptr, height, width, out_height, out_width,
    CHANNELS: tl.constexpr, STEPS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """`plan` has (code, height, width) of each step: 0 shifts, 1 mirrors where drawn, 2 turns."""
    image = tl.program_id(0)
    pixel = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    written = pixel < out_height * out_width
    row = (pixel // out_width).to(tl.int64)
    column = (pixel % out_width).to(tl.int64)
    inside = written
    for back in tl.static_range(STEPS):
        step = STEPS - 1 - back
        code = tl.load(plan_ptr + 3 * step)
        high = tl.load(plan_ptr + 3 * step + 1)
        wide = tl.load(plan_ptr + 3 * step + 2)
        first = tl.load(drawn_ptr + (image * STEPS + step) * 2)
        second = tl.load(drawn_ptr + (image * STEPS + step) * 2 + 1)
        down, right = 2 * row - (high - 1), 2 * column - (wide - 1)
        turned_row = (first * down - second * right + (high << _FRACTION)) >> (_FRACTION + 1)
        turned_column = (second * down + first * right + (wide << _FRACTION)) >> (_FRACTION + 1)
        mirrored = tl.where(first > 0, wide - 1 - column, column)
        row = tl.where(code == 0, row + first, tl.where(code == 2, turned_row, row))
        column = tl.where(code == 0, column + second, tl.where(code == 2, turned_column, mirrored))
        inside = inside & (row >= 0) & (row < high) & (column >= 0) & (column < wide)
    source = tl.load(rows_ptr + image) * (CHANNELS * height * width) + row * width + column
    for channel in tl.static_range(CHANNELS):
        value = tl.load(pool_ptr + source + channel * height * width, mask=inside, other=0).to(tl.float32) / 255
        value = (value - tl.load(scale_ptr + channel)) / tl.load(scale_ptr + CHANNELS + channel)
        at = (image.to(tl.int64) * out_height * out_width + pixel) * CHANNELS + channel
        tl.store(out_ptr + at, value, mask=written)


def take_images(
    pool: Tensor, rows: Tensor, drawn: Tensor, plan: Tensor, scale: Tensor, size: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """(client, batch, height, width, channel) of the pool's rows (client, batch), moved as drawn."""
    _, channels, height, width = pool.shape
    out = torch.empty(*rows.shape, *size, channels, dtype=dtype, device=pool.device)
    grid = (rows.numel(), triton.cdiv(size[0] * size[1], _PIXELS))
    _images_kernel[grid](
        pool, rows.contiguous(), drawn.contiguous(), plan, scale, out, height, width, *size,
        CHANNELS=channels, STEPS=drawn.shape[-2], PIXELS=_PIXELS, num_warps=4,
    )  # fmt: skip
    return out
