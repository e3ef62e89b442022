"""Operators over a stack of clients, by name, so that a traced step can be rewritten (`engines.stack.fusion`).

Every operator has a reference in plain torch, which runs where the Triton kernels do not (CPU, float64), and which they
are tested against. Activations are (client, batch, channel, height, width), laid out with the channel last.
"""
# torch.library reads the annotations of an operator, so this file does without `from __future__ import annotations`.

import os
from contextvars import ContextVar
from importlib.util import find_spec
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.grad import conv2d_input, conv2d_weight

from fednorm.engines.stack.kernels.tiles import conv_tile, weight_cut

HAS_TRITON = find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton plays kernels on the CPU, number by number: slow, for tests, which teach it narrow types."""
SIDE_BY_SIDE = ContextVar("SIDE_BY_SIDE", default=False)
"""Whether this thread makes kernels beside others: Python's parser, which Triton asks, may then fail for no reason."""
_TYPES = (torch.float32,) if INTERPRETED else (torch.float32, torch.bfloat16, torch.float16)


def kernels_run(device: torch.device) -> bool:
    """Whether there are Triton kernels for what lies here."""
    return INTERPRETED or (HAS_TRITON and device.type == "cuda")


def kernels_fit(x: Tensor) -> bool:
    """Whether the Triton kernels can run on this."""
    return kernels_run(x.device) and x.dtype in _TYPES


def channels_last(x: Tensor) -> Tensor:
    """(client, batch, channel, height, width) as (client, batch, height, width, channel), contiguous."""
    return x.permute(0, 1, 3, 4, 2).contiguous()


def _rows(x: Tensor) -> Tensor:
    """(client, channel), each client's channels side by side."""
    return x if x.dim() == 1 or x.stride(1) == 1 else x.contiguous()


def filters(w: Tensor) -> Tensor:
    """(client, out, height, width, in), each client's filters in one piece."""
    laid = w.permute(0, 1, 3, 4, 2)
    return laid if laid[0].is_contiguous() else laid.contiguous()


def channels_second(x: Tensor) -> Tensor:
    """The way back, as a view."""
    return x.permute(0, 1, 4, 2, 3)


def master_type(x: Tensor) -> torch.dtype:
    """The type gradients of weights have: that of the master weights, also where activations are narrower."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def wide(x: Tensor) -> Tensor:
    """Numbers as the kernels calculate with them, whatever they are read and written as."""
    return x.to(master_type(x))


def merge_groups(x: Tensor) -> Tensor:
    """(client, batch, channel, ...) as (batch, client * channel, ...)."""
    return x.transpose(0, 1).flatten(1, 2)


def split_groups(y: Tensor, clients: int) -> Tensor:
    return y.unflatten(1, (clients, -1)).transpose(0, 1)


def _shape(w: Tensor, stride: int, padding: list[int]) -> Any:
    from fednorm.engines.stack.kernels.conv import Shape

    return Shape(stride, padding[0], padding[1], w.shape[3], w.shape[4])


def _out_size(x: Tensor, w: Tensor, stride: int, padding: list[int]) -> tuple[int, int]:
    height, width = ((x.shape[3 + i] + 2 * padding[i] - w.shape[3 + i]) // stride + 1 for i in (0, 1))
    return height, width


def part_rows(w: Tensor, y: Tensor) -> int:
    """How many pixels each part of `conv_moments` covers, of a convolution with this output."""
    clients, outs, ins, *kernel = w.shape
    pixels = y.numel() // (clients * outs)
    return conv_tile(ins, outs, prod(kernel), pixels, clients, y.dtype == torch.float32).pixels


@torch.library.custom_op("fednorm::images", mutates_args=())
def images(
    pool: Tensor, rows: Tensor, drawn: Tensor, plan: Tensor, scale: Tensor, size: list[int], dtype: torch.dtype
) -> Tensor:
    """Images of a pool, augmented and scaled; see `engines.stack.gather`, whose reference is `Batches.gather`."""
    from fednorm.engines.stack.kernels.images import take_images

    return channels_second(take_images(pool, rows, drawn, plan, scale, (size[0], size[1]), dtype))


@torch.library.custom_op("fednorm::conv", mutates_args=())
def conv(
    x: Tensor, w: Tensor, stride: int, padding: list[int], bias: Tensor | None = None, relu: bool = False
) -> Tensor:
    """A convolution with weights per client, with a bias (client, channel) and a ReLU behind it."""
    if kernels_fit(x):
        return _conv_kernel(x, w, stride, padding, bias, relu, moments=False)[0]
    clients, each = len(w), wide(w.to(x.dtype)).flatten(0, 1)
    y = split_groups(functional.conv2d(merge_groups(wide(x)), each, None, stride, padding, 1, clients), clients)
    y = y if bias is None else y + _spread(bias)
    return channels_second(channels_last((y.relu() if relu else y).to(x.dtype)))


def _conv_kernel(
    x: Tensor, w: Tensor, stride: int, padding: list[int], bias: Tensor | None, relu: bool, moments: bool
) -> tuple[Tensor, Tensor]:
    from fednorm.engines.stack.kernels.conv import run_conv

    size, shape = _out_size(x, w, stride, padding), _shape(w, stride, padding)
    offset = None if bias is None else _rows(bias)
    y, parts = run_conv(channels_last(x), filters(w), size, shape, bias=offset, relu=relu, moments=moments)
    return channels_second(y), parts


@torch.library.custom_op("fednorm::conv_moments", mutates_args=())
def conv_moments(
    x: Tensor, w: Tensor, stride: int, padding: list[int], bias: Tensor | None = None, relu: bool = False
) -> tuple[Tensor, Tensor]:
    """A convolution, and (client, part, 2, channel): mean and squared deviations of the pixels of each part."""
    if kernels_fit(x):
        return _conv_kernel(x, w, stride, padding, bias, relu, moments=True)
    y = conv(x, w, stride, padding, bias, relu)
    return y, moments_of(channels_last(y).flatten(1, 3), part_rows(w, y))


def moments_of(pixels: Tensor, rows: int) -> Tensor:
    """(client, part, 2, channel): mean and squared deviations of pixels (client, pixel, channel), so many at a time."""
    chunks = wide(pixels).split(rows, 1)
    moments = [torch.stack([c.mean(1), (c - c.mean(1, True)).square().sum(1)], 1) for c in chunks]
    return torch.stack(moments, 1)


@torch.library.custom_op("fednorm::conv_input_grad", mutates_args=())
def conv_input_grad(
    dy: Tensor, w: Tensor, size: list[int], stride: int, padding: list[int], addend: Tensor | None = None
) -> Tensor:
    """The gradient of a convolution's input, of this height and width, with something added."""
    if kernels_fit(dy):
        from fednorm.engines.stack.kernels.conv import run_conv

        extra = None if addend is None else channels_last(addend)
        shape, out = _shape(w, stride, padding), (size[0], size[1])
        grad, _ = run_conv(channels_last(dy), filters(w), out, shape, backward=True, addend=extra)
        return channels_second(grad)
    clients, each = len(w), wide(w.to(dy.dtype)).flatten(0, 1)
    shape = (dy.shape[1], clients * w.shape[2], *size)
    pads = cast(int, tuple(padding))
    dx = split_groups(conv2d_input(shape, each, merge_groups(wide(dy)), stride, pads, 1, clients), clients)
    dx = dx if addend is None else dx + addend
    return channels_second(channels_last(dx.to(dy.dtype)))


def _weight_grad_kernel(x: Tensor, dy: Tensor, kernel: list[int], stride: int, padding: list[int]) -> Tensor:
    from fednorm.engines.stack.kernels.conv import Shape, run_weight_grad

    shape = Shape(stride, padding[0], padding[1], kernel[0], kernel[1])
    return run_weight_grad(channels_last(x), channels_last(dy), shape)


def added(parts: Tensor) -> Tensor:
    """(client, part, ...) summed over the parts, always in the same order, so that two runs are equal."""
    return parts[:, 0] if parts.shape[1] == 1 else parts.sum(1)


@torch.library.custom_op("fednorm::conv_weight_grad", mutates_args=())
def conv_weight_grad(x: Tensor, dy: Tensor, kernel: list[int], stride: int, padding: list[int]) -> Tensor:
    """The gradient of a convolution's weights, laid out as (client, out, height, width, in)."""
    if kernels_fit(x):
        return channels_second(added(_weight_grad_kernel(x, dy, kernel, stride, padding)))
    clients = len(x)
    shape = (clients * dy.shape[2], x.shape[2], *kernel)
    pads = cast(int, tuple(padding))
    dw = conv2d_weight(merge_groups(wide(x)), shape, merge_groups(wide(dy)), stride, pads, 1, clients)
    return channels_second(channels_last(dw.unflatten(0, (clients, -1))))


@torch.library.custom_op("fednorm::conv_weight_grad_parts", mutates_args=())
def conv_weight_grad_parts(x: Tensor, dy: Tensor, kernel: list[int], stride: int, padding: list[int]) -> Tensor:
    """(client, part, number): the same as it lies in memory, in parts that are still to be added."""
    if kernels_fit(x):
        return _weight_grad_kernel(x, dy, kernel, stride, padding).flatten(2)
    return channels_last(conv_weight_grad(x, dy, kernel, stride, padding)).flatten(1).unsqueeze(1)


def _spread(values: Tensor) -> Tensor:
    """(client, channel) as a factor of (client, batch, channel, height, width)."""
    return values[:, None, :, None, None]


def _normalised(x: Tensor, mean: Tensor, var: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
    return (x - _spread(mean)) * _spread((var + eps).rsqrt() * gamma) + _spread(beta)


@torch.library.custom_op("fednorm::norm", mutates_args=())
def norm(
    x: Tensor, gamma: Tensor, beta: Tensor, running_mean: Tensor, running_var: Tensor, counter: Tensor,
    training: bool, rate: float, eps: float, addend: Tensor | None = None, relu: bool = False,
    parts: Tensor | None = None, part_rows: int = 0, ceiling: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """y, the mean and biased variance it was normalised by, and what the running statistics become.

    In place of batch statistics, `training` false takes the running ones, which stay (the last three are empty). A ReLU
    with a `ceiling` is a ReLU6.
    """
    if kernels_fit(x):
        from fednorm.engines.stack.kernels.norm import Running, run_norm

        running = Running(_rows(running_mean), _rows(running_var), counter)
        y, mean, var, moved = run_norm(
            channels_last(x), _rows(gamma), _rows(beta), running, training=training, rate=rate, eps=eps,
            addend=None if addend is None else channels_last(addend), relu=relu,
            ceiling=ceiling, parts=None if parts is None else (parts, part_rows),
        )  # fmt: skip
        if not training:
            return channels_second(y), mean, var, mean.new_empty(0), mean.new_empty(0), counter.new_empty(0)
        return channels_second(y), mean, var, moved.mean, moved.var, moved.counter
    z = wide(x)
    if training:
        var, mean = torch.var_mean(z, (1, 3, 4), correction=0)
    else:
        mean, var = running_mean.clone(), running_var.clone()
    y = _normalised(z, mean, var, gamma, beta, eps)
    y = y if addend is None else y + addend
    y = channels_second(channels_last((y.clamp(0, ceiling) if relu else y).to(x.dtype)))
    if not training:
        return y, mean, var, mean.new_empty(0), mean.new_empty(0), counter.new_empty(0)
    count = x.numel() // (x.shape[0] * x.shape[2])
    new_mean = running_mean + rate * (mean - running_mean)
    return y, mean, var, new_mean, running_var + rate * (var * (count / (count - 1)) - running_var), counter + 1


@torch.library.custom_op("fednorm::norm_grad", mutates_args=())
def norm_grad(
    x: Tensor, dy: Tensor, mean: Tensor, var: Tensor, gamma: Tensor, training: bool, eps: float,
    y: Tensor | None = None, masked: bool = False, ceiling: float | None = None, beta: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, gamma and beta; with y, the output of a ReLU after the norm, dy is that ReLU's gradient.

    So it is with `beta`, from which y is computed anew, to the bit: x is read anyway. The last is dy behind the ReLU,
    where `masked` asks for it, else empty.
    """
    if kernels_fit(x):
        from fednorm.engines.stack.kernels.norm import run_norm_grad

        dx, dgamma, dbeta, through = run_norm_grad(
            channels_last(x), channels_last(dy), mean, var, _rows(gamma), training=training, eps=eps,
            y=None if y is None else channels_last(y), beta=None if beta is None else _rows(beta), ceiling=ceiling,
            masked=masked,
        )  # fmt: skip
        return channels_second(dx), dgamma, dbeta, channels_second(through) if masked else through
    y = y if beta is None else _normalised(wide(x), mean, var, gamma, beta, eps).to(x.dtype)
    dz = dy if y is None else torch.where((y <= 0) | (False if ceiling is None else y >= ceiling), 0, dy)
    grad = wide(dz)
    inverse = (var + eps).rsqrt()
    hat = (wide(x) - _spread(mean)) * _spread(inverse)
    dgamma, dbeta = (grad * hat).sum((1, 3, 4)), grad.sum((1, 3, 4))
    if training:
        count = x.numel() // (x.shape[0] * x.shape[2])
        grad = grad - _spread(dbeta / count) - hat * _spread(dgamma / count)
    dx = channels_second(channels_last((_spread(gamma * inverse) * grad).to(x.dtype)))
    return dx, dgamma, dbeta, channels_second(channels_last(dz)) if masked else dy.new_empty(0)


def laid_out(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """An activation or filter of this shape (client, batch, channel, height, width), laid out as the operators do."""
    clients, batch, channels, height, width = shape
    return channels_second(like.new_empty(clients, batch, height, width, channels, dtype=dtype or like.dtype))


# What torch must know of the operators to trace a step without running it: the shapes they return.
@images.register_fake
def _(
    pool: Tensor, rows: Tensor, drawn: Tensor, plan: Tensor, scale: Tensor, size: list[int], dtype: torch.dtype
) -> Tensor:
    return laid_out(scale, *rows.shape, pool.shape[1], *size, dtype=dtype)


@conv.register_fake
def _(x: Tensor, w: Tensor, stride: int, padding: list[int], bias: Tensor | None = None, relu: bool = False) -> Tensor:
    return laid_out(x, *x.shape[:2], w.shape[1], *_out_size(x, w, stride, padding))


@conv_moments.register_fake
def _(
    x: Tensor, w: Tensor, stride: int, padding: list[int], bias: Tensor | None = None, relu: bool = False
) -> tuple[Tensor, Tensor]:
    y = laid_out(x, *x.shape[:2], w.shape[1], *_out_size(x, w, stride, padding))
    parts = -(-y.numel() // (y.shape[0] * y.shape[2] * part_rows(w, y)))
    return y, x.new_empty(len(x), parts, 2, w.shape[1], dtype=master_type(x))


@conv_input_grad.register_fake
def _(dy: Tensor, w: Tensor, size: list[int], stride: int, padding: list[int], addend: Tensor | None = None) -> Tensor:
    return laid_out(dy, *dy.shape[:2], w.shape[2], *size)


@conv_weight_grad.register_fake
def _(x: Tensor, dy: Tensor, kernel: list[int], stride: int, padding: list[int]) -> Tensor:
    return laid_out(x, len(x), dy.shape[2], x.shape[2], *kernel, dtype=master_type(x))


@conv_weight_grad_parts.register_fake
def _(x: Tensor, dy: Tensor, kernel: list[int], stride: int, padding: list[int]) -> Tensor:
    clients, batch, ins = x.shape[:3]
    (outs, *size), taps, parts = dy.shape[2:], kernel[0] * kernel[1], 1
    if kernels_fit(x):
        _, cut = weight_cut(ins, outs, taps, batch * size[0] * size[1], clients, x.dtype == torch.float32)
        parts = cut.parts
    return x.new_empty(clients, parts, outs * taps * ins, dtype=master_type(x))


@norm.register_fake
def _(
    x: Tensor, gamma: Tensor, beta: Tensor, running_mean: Tensor, running_var: Tensor, counter: Tensor,
    training: bool, rate: float, eps: float, addend: Tensor | None = None, relu: bool = False,
    parts: Tensor | None = None, part_rows: int = 0, ceiling: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    mean, var = gamma.new_empty(gamma.shape), gamma.new_empty(gamma.shape)
    shape = gamma.shape if training else (0,)
    moved = gamma.new_empty(shape), gamma.new_empty(shape), counter.new_empty(counter.shape if training else (0,))
    return laid_out(x, *x.shape), mean, var, *moved


@norm_grad.register_fake
def _(
    x: Tensor, dy: Tensor, mean: Tensor, var: Tensor, gamma: Tensor, training: bool, eps: float,
    y: Tensor | None = None, masked: bool = False, ceiling: float | None = None, beta: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    through = laid_out(dy, *dy.shape) if masked else dy.new_empty(0)
    return laid_out(x, *x.shape), gamma.new_empty(gamma.shape), gamma.new_empty(gamma.shape), through
