"""Triton kernels for norms over the groups of each image of a stack, activations laid out with the channel last.

A program has one image of one client: it goes over its pixels once for the mean, once for the deviations from it, so
that no large sums cancel, and once to write. The second and the third time the image is in a cache.
"""
# Triton reads annotations of constants at run time, so this file does without `from __future__ import annotations`.

import torch
import triton
import triton.language as tl
from torch import Tensor

from fednorm.engines.stack.kernels.launch import kernel

_ELEMENTS = 8192
"""Numbers of a tile, which stay in registers."""


@triton.jit
def _by_group(each, CHANNELS: tl.constexpr, GROUPS: tl.constexpr):
    """For each channel, the sum over the channels of its group."""
    grouped = tl.reshape(each, (GROUPS, CHANNELS // GROUPS))
    total = tl.sum(grouped, 1)
    return tl.reshape(tl.broadcast_to(total[:, None], (GROUPS, CHANNELS // GROUPS)), (CHANNELS,))


@triton.jit
def _pixels(image, start, rows, CHANNELS: tl.constexpr, ROWS: tl.constexpr):
    """Where some pixels of an image lie, with all their channels, and which of them there are."""
    row = start + tl.arange(0, ROWS)
    at = image * rows * CHANNELS + row[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    return at, (row < rows)[:, None]


@kernel("batch", "rows")  # one kernel for batches and images of all sizes
def _forward_kernel(
    x_ptr, gamma_ptr, beta_ptr, add_ptr, y_ptr, mean_ptr, inverse_ptr, gamma_stride, beta_stride, batch, rows, eps,
    CHANNELS: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    client = image // batch
    channel = tl.arange(0, CHANNELS)
    count = (rows * (CHANNELS // GROUPS)).to(tl.float32)
    total = tl.zeros((CHANNELS,), dtype=tl.float32)
    for start in range(0, rows, ROWS):
        at, mask = _pixels(image, start, rows, CHANNELS, ROWS)
        total += tl.sum(tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32), 0)
    mean = _by_group(total, CHANNELS, GROUPS) / count
    squares = tl.zeros((CHANNELS,), dtype=tl.float32)
    for start in range(0, rows, ROWS):
        at, mask = _pixels(image, start, rows, CHANNELS, ROWS)
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        away = tl.where(mask, x - mean[None, :], 0.0)
        squares += tl.sum(away * away, 0)
    var = _by_group(squares, CHANNELS, GROUPS) / count + eps
    # By a variance beyond float32 all would be divided to zeros, which hide that a client has diverged.
    inverse = tl.where(var < float("inf"), tl.rsqrt(var), float("nan"))
    tl.store(mean_ptr + image * CHANNELS + channel, mean)
    tl.store(inverse_ptr + image * CHANNELS + channel, inverse)
    scale = tl.load(gamma_ptr + client * gamma_stride + channel) * inverse
    beta = tl.load(beta_ptr + client * beta_stride + channel)
    for start in range(0, rows, ROWS):
        at, mask = _pixels(image, start, rows, CHANNELS, ROWS)
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        y = (x - mean[None, :]) * scale[None, :] + beta[None, :]
        if ADD:
            y += tl.load(add_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if RELU:
            y = tl.maximum(y, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gradient(dy_ptr, y_ptr, at, mask, RELU: tl.constexpr):
    """The gradient behind the ReLU, if there is one."""
    dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if RELU:
        dy = tl.where(tl.load(y_ptr + at, mask=mask, other=0.0).to(tl.float32) <= 0, 0.0, dy)
    return dy


@kernel("batch", "rows")
def _backward_kernel(
    x_ptr, dy_ptr, y_ptr, mean_ptr, inverse_ptr, gamma_ptr, dx_ptr, dgamma_ptr, dbeta_ptr, masked_ptr, gamma_stride,
    batch, rows, CHANNELS: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, RELU: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The gradient of x, and each image's part of those of gamma and beta."""
    image = tl.program_id(0).to(tl.int64)
    client = image // batch
    channel = tl.arange(0, CHANNELS)
    count = (rows * (CHANNELS // GROUPS)).to(tl.float32)
    mean = tl.load(mean_ptr + image * CHANNELS + channel)
    inverse = tl.load(inverse_ptr + image * CHANNELS + channel)
    gamma = tl.load(gamma_ptr + client * gamma_stride + channel)
    sums = tl.zeros((CHANNELS,), dtype=tl.float32)
    products = tl.zeros((CHANNELS,), dtype=tl.float32)
    for start in range(0, rows, ROWS):
        at, mask = _pixels(image, start, rows, CHANNELS, ROWS)
        dy = _gradient(dy_ptr, y_ptr, at, mask, RELU)
        hat = (tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32) - mean[None, :]) * inverse[None, :]
        sums += tl.sum(dy, 0)
        products += tl.sum(dy * hat, 0)
    tl.store(dgamma_ptr + image * CHANNELS + channel, products)
    tl.store(dbeta_ptr + image * CHANNELS + channel, sums)
    level = _by_group(gamma * sums, CHANNELS, GROUPS) / count
    slope = _by_group(gamma * products, CHANNELS, GROUPS) / count
    for start in range(0, rows, ROWS):
        at, mask = _pixels(image, start, rows, CHANNELS, ROWS)
        dy = _gradient(dy_ptr, y_ptr, at, mask, RELU)
        if MASKED:
            tl.store(masked_ptr + at, dy.to(masked_ptr.dtype.element_ty), mask=mask)
        hat = (tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32) - mean[None, :]) * inverse[None, :]
        dx = inverse[None, :] * (gamma[None, :] * dy - level[None, :] - hat * slope[None, :])
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def _sizes(x: Tensor) -> tuple[int, int, int, int]:
    """Clients, images, pixels and channels of activations (client, batch, height, width, channel)."""
    clients, batch, height, width, channels = x.shape
    return clients, batch, height * width, channels


def _rows_at_once(rows: int, channels: int) -> int:
    return min(max(1, _ELEMENTS // channels), triton.next_power_of_2(rows))


def run_group_norm(
    x: Tensor, gamma: Tensor, beta: Tensor, groups: int, eps: float, *, addend: Tensor | None = None, relu: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """y, and for each image and channel the mean and the inverse deviation it was normalised by."""
    clients, batch, rows, channels = _sizes(x)
    y = torch.empty_like(x)
    mean, inverse = (torch.empty(clients, batch, channels, device=x.device) for _ in range(2))
    _forward_kernel[(clients * batch,)](
        x, gamma, beta, x if addend is None else addend, y, mean, inverse, gamma.stride(0), beta.stride(0), batch,
        rows, eps, CHANNELS=channels, GROUPS=groups, ROWS=_rows_at_once(rows, channels), ADD=addend is not None,
        RELU=relu, num_warps=8,
    )  # fmt: skip
    return y, mean, inverse


def run_group_norm_grad(
    x: Tensor, dy: Tensor, mean: Tensor, inverse: Tensor, gamma: Tensor, groups: int, *, y: Tensor | None, masked: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, and of gamma and beta as (client, image, channel), still to be summed over the images.

    With y, dy is that of its ReLU, which `masked` hands over too.
    """
    clients, batch, rows, channels = _sizes(x)
    dx, through = torch.empty_like(x), torch.empty_like(dy) if masked else dy.new_empty(0)
    dgamma, dbeta = (torch.empty(clients, batch, channels, device=x.device) for _ in range(2))
    _backward_kernel[(clients * batch,)](
        x, dy, x if y is None else y, mean, inverse, gamma, dx, dgamma, dbeta, through, gamma.stride(0), batch, rows,
        CHANNELS=channels, GROUPS=groups, ROWS=_rows_at_once(rows, channels), RELU=y is not None, MASKED=masked,
        num_warps=8,
    )  # fmt: skip
    return dx, dgamma, dbeta, through
