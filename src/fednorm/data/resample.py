"""Crops of images brought back to the size of the whole; bytes in whole numbers, so that no device rounds otherwise."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = 8
_ONE = 1 << _BITS


def cropped_bilinear(x: Tensor, top: Tensor, height: Tensor, left: Tensor, width: Tensor) -> Tensor:
    """Images (B, C, H, W) of which a crop each, given as vectors over B, fills the whole; as torch's bilinear does.

    Middles of pixels lie on middles. A crop is never larger than the image, so there is nothing to smooth.
    """
    wide = x if x.is_floating_point() else x.to(torch.int32)
    rows, columns = _between(x.shape[2], top, height), _between(x.shape[3], left, width)
    mixed = _mix(_mix(wide, rows, 2), columns, 3)
    if x.is_floating_point():
        return mixed / _ONE**2
    return ((mixed + _ONE**2 // 2) >> (2 * _BITS)).to(x.dtype)


def cropped_nearest(x: Tensor, top: Tensor, height: Tensor, left: Tensor, width: Tensor) -> Tensor:
    """The same for masks (B, C, H, W), whose values are names: each pixel is that of the nearest middle."""
    rows, columns = _nearest(x.shape[2], top, height), _nearest(x.shape[3], left, width)
    return _take(_take(x, rows, 2), columns, 3)


def _between(size: int, start: Tensor, length: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each of `size` places the two pixels it lies between, and how near it is to the second, (B, size)."""
    twice = 2 * torch.arange(size, device=start.device) + 1
    at = (twice * (length.unsqueeze(1) << _BITS)) // (2 * size) - _ONE // 2
    at = at.clamp(min=0)
    first = at >> _BITS
    second = torch.minimum(first + 1, length.unsqueeze(1) - 1)
    return start.unsqueeze(1) + first, start.unsqueeze(1) + second, at & (_ONE - 1)


def _nearest(size: int, start: Tensor, length: Tensor) -> Tensor:
    twice = 2 * torch.arange(size, device=start.device) + 1
    return start.unsqueeze(1) + (twice * length.unsqueeze(1)) // (2 * size)


def _mix(x: Tensor, places: tuple[Tensor, Tensor, Tensor], axis: int) -> Tensor:
    """Values between pixels along an axis, times `_ONE`."""
    first, second, share = places
    near = share.to(x.dtype).view(len(share), 1, *((-1, 1) if axis == 2 else (1, -1)))
    return _take(x, first, axis) * (_ONE - near) + _take(x, second, axis) * near


def _take(x: Tensor, index: Tensor, axis: int) -> Tensor:
    """Rows (axis 2) or columns (axis 3) of each image."""
    shape = (*x.shape[:3], index.shape[1]) if axis == 3 else (*x.shape[:2], index.shape[1], x.shape[3])
    lines = index.view(len(index), 1, *((-1, 1) if axis == 2 else (1, -1)))
    return x.gather(axis, lines.expand(shape))
