"""A Triton kernel of standardised weights and of their gradient: a program has a filter and reads it once."""
# Triton reads annotations of constants at run time, so this file does without `from __future__ import annotations`.

import torch
import triton
import triton.language as tl
from torch import Tensor

from fednorm.engines.stack.kernels.launch import kernel
from fednorm.layers.ws_conv import Standard


@kernel()
def _standard_kernel(
    w_ptr, dy_ptr, out_ptr, w_stride, outs, numbers, gain, divisor, floor, offset,
    BACKWARD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, client = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < numbers
    w = tl.load(w_ptr + client * w_stride + row * numbers + at, mask=inside, other=0.0)
    centred = tl.where(inside, w - tl.sum(w, 0) / numbers, 0.0)
    norm = tl.sqrt(tl.sum(centred * centred, 0))
    spread = norm / divisor
    # Not `tl.maximum`, which would hide what is no number.
    bounded = tl.where(spread < floor, floor, spread) + offset
    scale = gain / bounded
    place = (client * outs + row) * numbers + at
    if BACKWARD:
        dy = tl.load(dy_ptr + place, mask=inside, other=0.0)
        along = tl.sum(dy * centred, 0)
        turned = tl.where((norm > 0) & (spread >= floor), scale * along / (bounded * divisor * norm), 0.0)
        away = tl.where(inside, scale * dy - turned * centred, 0.0)
        tl.store(out_ptr + place, away - tl.sum(away, 0) / numbers, mask=inside)
    else:
        tl.store(out_ptr + place, scale * centred, mask=inside)


def run_standardise(w: Tensor, standard: Standard, dy: Tensor | None = None) -> Tensor:
    """Filters (client, out, height, width, in), standardised; with dy, the gradient behind it, that in front.

    Clients' filters may lie apart, as views into a longer row.
    """
    clients, outs = w.shape[:2]
    numbers = w[0, 0].numel()
    found = torch.empty(w.shape, device=w.device)
    _standard_kernel[(outs, clients)](
        w, w if dy is None else dy, found, w.stride(0), outs, numbers, *standard,
        BACKWARD=dy is not None, BLOCK=triton.next_power_of_2(numbers), num_warps=4,
    )  # fmt: skip
    return found
