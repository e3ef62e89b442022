"""Depthwise convolutions over a stack of clients: operators by name, each with its reference in plain torch.

As in `fednorm.engines.stack.kernels.ops`, the Triton kernels run where they fit, the references elsewhere.
"""
# torch.library reads the annotations of an operator, so this file does without `from __future__ import annotations`.

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.grad import conv2d_input, conv2d_weight

from fednorm.engines.stack.kernels.ops import (
    added,
    channels_last,
    channels_second,
    kernels_fit,
    laid_out,
    master_type,
    merge_groups,
    moments_of,
    split_groups,
    wide,
)
from fednorm.engines.stack.kernels.tiles import DEPTH_PIXELS, depth_rows, filter_cut


def _shape(kernel: list[int], stride: int, padding: list[int], dilation: int) -> Any:
    from fednorm.engines.stack.kernels.depthwise import Depth

    return Depth(stride, padding[0], padding[1], kernel[0], kernel[1], dilation)


def _out_size(x: Tensor, w: Tensor, stride: int, padding: list[int], dilation: int) -> tuple[int, int]:
    sizes = zip(x.shape[3:], w.shape[3:], padding, strict=True)
    height, width = ((size + 2 * pad - dilation * (taps - 1) - 1) // stride + 1 for size, taps, pad in sizes)
    return height, width


def _filters(w: Tensor) -> Tensor:
    """(client, channel, height, width), each client's filters in one piece."""
    laid = w.squeeze(2)
    return laid if laid[0].is_contiguous() else laid.contiguous()


def _convolved(
    x: Tensor, w: Tensor, stride: int, padding: list[int], dilation: int, moments: bool
) -> tuple[Tensor, Tensor]:
    from fednorm.engines.stack.kernels.depthwise import run_depthwise

    size, shape = _out_size(x, w, stride, padding, dilation), _shape(list(w.shape[3:]), stride, padding, dilation)
    y, parts = run_depthwise(channels_last(x), _filters(w), size, shape, moments=moments)
    return channels_second(y), parts


@torch.library.custom_op("fednorm::depthwise", mutates_args=())
def depthwise(x: Tensor, w: Tensor, stride: int, padding: list[int], dilation: int) -> Tensor:
    """A convolution of each channel with a filter of its own, w (client, channel, 1, height, width)."""
    if kernels_fit(x):
        return _convolved(x, w, stride, padding, dilation, moments=False)[0]
    clients, each = len(w), wide(w.to(x.dtype)).flatten(0, 1)
    y = functional.conv2d(merge_groups(wide(x)), each, None, stride, padding, dilation, len(each))
    return channels_second(channels_last(split_groups(y, clients).to(x.dtype)))


@depthwise.register_fake
def _(x: Tensor, w: Tensor, stride: int, padding: list[int], dilation: int) -> Tensor:
    return laid_out(x, *x.shape[:3], *_out_size(x, w, stride, padding, dilation))


@torch.library.custom_op("fednorm::depthwise_moments", mutates_args=())
def depthwise_moments(x: Tensor, w: Tensor, stride: int, padding: list[int], dilation: int) -> tuple[Tensor, Tensor]:
    """The same, and (client, part, 2, channel): mean and squared deviations of the pixels of each part.

    Pixels of one part lie in columns of two or four, so the height of y must be even.
    """
    if kernels_fit(x):
        return _convolved(x, w, stride, padding, dilation, moments=True)
    y = depthwise(x, w, stride, padding, dilation)
    # (client, image, group of rows, column, row of the group, channel)
    columns = channels_last(y).unflatten(2, (-1, depth_rows(y.shape[3]))).movedim(3, 4)
    return y, moments_of(columns.flatten(1, 4), DEPTH_PIXELS)


@depthwise_moments.register_fake
def _(x: Tensor, w: Tensor, stride: int, padding: list[int], dilation: int) -> tuple[Tensor, Tensor]:
    y = laid_out(x, *x.shape[:3], *_out_size(x, w, stride, padding, dilation))
    parts = -(-y.numel() // (y.shape[0] * y.shape[2] * DEPTH_PIXELS))
    return y, x.new_empty(len(x), parts, 2, x.shape[2], dtype=master_type(x))


@torch.library.custom_op("fednorm::depthwise_input_grad", mutates_args=())
def depthwise_input_grad(
    dy: Tensor, w: Tensor, size: list[int], stride: int, padding: list[int], dilation: int
) -> Tensor:
    """The gradient of the input, of this height and width."""
    if kernels_fit(dy):
        from fednorm.engines.stack.kernels.depthwise import run_depthwise

        shape = _shape(list(w.shape[3:]), stride, padding, dilation)
        grad, _ = run_depthwise(channels_last(dy), _filters(w), (size[0], size[1]), shape, backward=True)
        return channels_second(grad)
    clients, each = len(w), wide(w.to(dy.dtype)).flatten(0, 1)
    shape = (dy.shape[1], len(each), *size)
    pads = cast(int, tuple(padding))
    dx = conv2d_input(shape, each, merge_groups(wide(dy)), stride, pads, dilation, len(each))
    return channels_second(channels_last(split_groups(dx, clients).to(dy.dtype)))


@depthwise_input_grad.register_fake
def _(dy: Tensor, w: Tensor, size: list[int], stride: int, padding: list[int], dilation: int) -> Tensor:
    return laid_out(dy, *dy.shape[:3], *size)


def _filter_grad_kernel(
    x: Tensor, dy: Tensor, kernel: list[int], stride: int, padding: list[int], dilation: int
) -> Tensor:
    from fednorm.engines.stack.kernels.depthwise import run_filter_grad

    return run_filter_grad(channels_last(x), channels_last(dy), _shape(kernel, stride, padding, dilation))


@torch.library.custom_op("fednorm::depthwise_weight_grad", mutates_args=())
def depthwise_weight_grad(
    x: Tensor, dy: Tensor, kernel: list[int], stride: int, padding: list[int], dilation: int
) -> Tensor:
    """The gradient of the filters (client, channel, 1, height, width), in the type of the master weights."""
    if kernels_fit(x):
        return added(_filter_grad_kernel(x, dy, kernel, stride, padding, dilation)).unsqueeze(2)
    clients, channels = len(x), len(x) * x.shape[2]
    pads = cast(int, tuple(padding))
    numbers = stride, pads, dilation, channels
    dw = conv2d_weight(merge_groups(wide(x)), (channels, 1, *kernel), merge_groups(wide(dy)), *numbers)
    return dw.unflatten(0, (clients, -1)).contiguous()


@depthwise_weight_grad.register_fake
def _(x: Tensor, dy: Tensor, kernel: list[int], stride: int, padding: list[int], dilation: int) -> Tensor:
    return x.new_empty(len(x), x.shape[2], 1, *kernel, dtype=master_type(x))


@torch.library.custom_op("fednorm::depthwise_weight_grad_parts", mutates_args=())
def depthwise_weight_grad_parts(
    x: Tensor, dy: Tensor, kernel: list[int], stride: int, padding: list[int], dilation: int
) -> Tensor:
    """(client, part, number): the same in parts that are still to be added."""
    if kernels_fit(x):
        return _filter_grad_kernel(x, dy, kernel, stride, padding, dilation).flatten(2)
    return depthwise_weight_grad(x, dy, kernel, stride, padding, dilation).flatten(1).unsqueeze(1)


@depthwise_weight_grad_parts.register_fake
def _(x: Tensor, dy: Tensor, kernel: list[int], stride: int, padding: list[int], dilation: int) -> Tensor:
    clients, batch, channels = x.shape[:3]
    taps, parts = kernel[0] * kernel[1], 1
    if kernels_fit(x):
        parts = filter_cut(channels, taps, batch * dy.shape[3] * dy.shape[4], clients).parts
    return x.new_empty(clients, parts, channels * taps, dtype=master_type(x))
