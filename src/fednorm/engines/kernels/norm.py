"""Triton kernels for the batch norms of a stack of clients, activations laid out with the channel last.

Two launches forward and two backward: programs take the moments of a chunk of pixels, and the second launch joins the
chunks (Chan's rule, so that no large sums cancel) before it writes its tile.
"""
# Triton reads annotations of constants at run time, so this file does without `from __future__ import annotations`.
# A jitted kernel is started by indexing it with its grid, which type checkers cannot know.
# pyright: reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _moments_kernel(x_ptr, part_ptr, rows, chunks, CHANNELS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    chunk = tl.program_id(0)
    client = tl.program_id(1)
    row = chunk * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (channel < CHANNELS)[None, :]
    at = (client.to(tl.int64) * rows + row)[:, None] * CHANNELS + channel[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    count = tl.minimum(rows - chunk * ROWS, ROWS).to(tl.float32)
    mean = tl.sum(x, 0) / count
    away = tl.where(mask, x - mean[None, :], 0.0)
    base = part_ptr + (client * chunks + chunk) * (2 * CHANNELS) + channel
    tl.store(base, mean, mask=channel < CHANNELS)
    tl.store(base + CHANNELS, tl.sum(away * away, 0), mask=channel < CHANNELS)


@triton.jit
def _join(part_ptr, client, chunks, rows, channel, CHANNELS: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr):
    """Mean and biased variance of a client's channels, from the moments of its chunks."""
    chunk = tl.arange(0, CHUNKS)
    count = tl.minimum(tl.maximum(rows - chunk * ROWS, 0), ROWS).to(tl.float32)
    at = (client * chunks + chunk)[:, None] * (2 * CHANNELS) + channel[None, :]
    mask = (chunk < chunks)[:, None] & (channel < CHANNELS)[None, :]
    means = tl.load(part_ptr + at, mask=mask, other=0.0)
    squares = tl.load(part_ptr + at + CHANNELS, mask=mask, other=0.0)
    mean = tl.sum(means * count[:, None], 0) / rows
    away = means - mean[None, :]
    return mean, (tl.sum(squares, 0) + tl.sum(away * away * count[:, None], 0)) / rows


@triton.jit
def _normalise_kernel(
    x_ptr, part_ptr, gamma_ptr, beta_ptr, y_ptr, mean_ptr, var_ptr, rows, chunks, eps,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    client = tl.program_id(1)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    mean, var = _join(part_ptr, client, chunks, rows, channel, CHANNELS, ROWS, CHUNKS)
    gamma = tl.load(gamma_ptr + client * CHANNELS + channel, mask=inside, other=0.0)
    beta = tl.load(beta_ptr + client * CHANNELS + channel, mask=inside, other=0.0)
    scale = gamma * tl.rsqrt(var + eps)
    if chunk == 0:
        tl.store(mean_ptr + client * CHANNELS + channel, mean, mask=inside)
        tl.store(var_ptr + client * CHANNELS + channel, var, mask=inside)
    row = chunk * ROWS + tl.arange(0, ROWS)
    mask = (row < rows)[:, None] & inside[None, :]
    at = (client.to(tl.int64) * rows + row)[:, None] * CHANNELS + channel[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    y = (x - mean[None, :]) * scale[None, :] + beta[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _grad_sums_kernel(
    x_ptr, dy_ptr, mean_ptr, var_ptr, part_ptr, rows, chunks, eps,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    client = tl.program_id(1)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    mean = tl.load(mean_ptr + client * CHANNELS + channel, mask=inside, other=0.0)
    var = tl.load(var_ptr + client * CHANNELS + channel, mask=inside, other=1.0)
    row = chunk * ROWS + tl.arange(0, ROWS)
    mask = (row < rows)[:, None] & inside[None, :]
    at = (client.to(tl.int64) * rows + row)[:, None] * CHANNELS + channel[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
    hat = (x - mean[None, :]) * tl.rsqrt(var + eps)[None, :]
    base = part_ptr + (client * chunks + chunk) * (2 * CHANNELS) + channel
    tl.store(base, tl.sum(dy, 0), mask=inside)
    tl.store(base + CHANNELS, tl.sum(dy * hat, 0), mask=inside)


@triton.jit
def _input_grad_kernel(
    x_ptr, dy_ptr, mean_ptr, var_ptr, gamma_ptr, part_ptr, dx_ptr, dgamma_ptr, dbeta_ptr, rows, chunks, eps,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    client = tl.program_id(1)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    every = tl.arange(0, CHUNKS)
    at = (client * chunks + every)[:, None] * (2 * CHANNELS) + channel[None, :]
    part_mask = (every < chunks)[:, None] & inside[None, :]
    dbeta = tl.sum(tl.load(part_ptr + at, mask=part_mask, other=0.0), 0)
    dgamma = tl.sum(tl.load(part_ptr + at + CHANNELS, mask=part_mask, other=0.0), 0)
    if chunk == 0:
        tl.store(dgamma_ptr + client * CHANNELS + channel, dgamma, mask=inside)
        tl.store(dbeta_ptr + client * CHANNELS + channel, dbeta, mask=inside)
    mean = tl.load(mean_ptr + client * CHANNELS + channel, mask=inside, other=0.0)
    var = tl.load(var_ptr + client * CHANNELS + channel, mask=inside, other=1.0)
    gamma = tl.load(gamma_ptr + client * CHANNELS + channel, mask=inside, other=0.0)
    inverse = tl.rsqrt(var + eps)
    row = chunk * ROWS + tl.arange(0, ROWS)
    mask = (row < rows)[:, None] & inside[None, :]
    at = (client.to(tl.int64) * rows + row)[:, None] * CHANNELS + channel[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
    hat = (x - mean[None, :]) * inverse[None, :]
    dx = (gamma * inverse)[None, :] * (dy - (dbeta / rows)[None, :] - hat * (dgamma / rows)[None, :])
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def _shape(x: Tensor) -> tuple[int, int, int, int, int, int]:
    """(clients, rows, channels, rows of a chunk, chunks, channels of a block) of a channels-last stack."""
    clients, channels = x.shape[0], x.shape[-1]
    rows = x.numel() // (clients * channels)
    block = min(64, triton.next_power_of_2(channels))
    # At most 256 chunks, so that every program can join them all.
    chunk = max(8192 // block, triton.next_power_of_2(triton.cdiv(rows, 256)))
    return clients, rows, channels, chunk, triton.cdiv(rows, chunk), block


def norm_forward(x: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """y, mean and biased variance of x (client, ..., channel), contiguous, by client and channel."""
    clients, rows, channels, chunk, chunks, block = _shape(x)
    parts = torch.empty(clients, chunks, 2, channels, device=x.device)
    grid = (chunks, clients, triton.cdiv(channels, block))
    _moments_kernel[grid](x, parts, rows, chunks, CHANNELS=channels, ROWS=chunk, BLOCK=block, num_warps=8)
    y = torch.empty_like(x)
    mean, var = torch.empty(2, clients, channels, device=x.device)
    _normalise_kernel[grid](
        x, parts, gamma, beta, y, mean, var, rows, chunks, eps,
        CHANNELS=channels, ROWS=chunk, BLOCK=block, CHUNKS=triton.next_power_of_2(chunks), num_warps=8,
    )  # fmt: skip
    return y, mean, var


def norm_backward(
    x: Tensor, dy: Tensor, mean: Tensor, var: Tensor, gamma: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, gamma and beta."""
    clients, rows, channels, chunk, chunks, block = _shape(x)
    parts = torch.empty(clients, chunks, 2, channels, device=x.device)
    grid = (chunks, clients, triton.cdiv(channels, block))
    _grad_sums_kernel[grid](
        x, dy, mean, var, parts, rows, chunks, eps, CHANNELS=channels, ROWS=chunk, BLOCK=block, num_warps=8
    )
    dx = torch.empty_like(x)
    dgamma, dbeta = torch.empty(2, clients, channels, device=x.device)
    _input_grad_kernel[grid](
        x, dy, mean, var, gamma, parts, dx, dgamma, dbeta, rows, chunks, eps,
        CHANNELS=channels, ROWS=chunk, BLOCK=block, CHUNKS=triton.next_power_of_2(chunks), num_warps=8,
    )  # fmt: skip
    return dx, dgamma, dbeta
