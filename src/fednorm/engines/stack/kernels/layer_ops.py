"""Operators over a stack of clients for group norms and linear layers, each with its reference in plain torch.

As in `fednorm.engines.stack.kernels.ops`, kernels run where they fit, the references elsewhere.
"""
# torch.library reads the annotations of an operator, so this file does without `from __future__ import annotations`.

import torch
from torch import Tensor

from fednorm.engines.stack.kernels.ops import channels_last, channels_second, kernels_fit, master_type
from fednorm.engines.stack.kernels.tiles import power_of_2


def _group_kernels_fit(x: Tensor, groups: int) -> bool:
    channels = x.shape[2]
    return kernels_fit(x) and power_of_2(channels) == channels and power_of_2(groups) == groups


def _spread(each: Tensor) -> Tensor:
    """(client, image, channel) or (client, 1, channel) as a factor of (client, image, channel, height, width)."""
    return each[..., None, None]


def _by_group(each: Tensor, groups: int) -> Tensor:
    """(client, image, channel): for each channel, the mean over the channels of its group."""
    return each.unflatten(2, (groups, -1)).mean(3, keepdim=True).expand(-1, -1, -1, each.shape[2] // groups).flatten(2)


@torch.library.custom_op("fednorm::group_norm", mutates_args=())
def group_norm(
    x: Tensor, gamma: Tensor, beta: Tensor, groups: int, eps: float, addend: Tensor | None = None, relu: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """y, and (client, image, channel) the mean and the inverse deviation of the channel's group in the image."""
    if _group_kernels_fit(x, groups):
        from fednorm.engines.stack.kernels.group_norm import run_group_norm

        extra = None if addend is None else channels_last(addend)
        y, mean, inverse = run_group_norm(channels_last(x), gamma, beta, groups, eps, addend=extra, relu=relu)
        return channels_second(y), mean, inverse
    wide = x.to(gamma.dtype)
    mean = _by_group(wide.mean((3, 4)), groups)
    away = wide - _spread(mean)
    var = _by_group(away.square().mean((3, 4)), groups) + eps
    inverse = torch.where(var < torch.inf, var.rsqrt(), torch.nan)  # what is beyond its type is not hidden by zeros
    y = away * _spread(inverse * gamma[:, None]) + _spread(beta[:, None])
    y = y if addend is None else y + addend
    return channels_second(channels_last((y.relu() if relu else y).to(x.dtype))), mean, inverse


@group_norm.register_fake
def _(
    x: Tensor, gamma: Tensor, beta: Tensor, groups: int, eps: float, addend: Tensor | None = None, relu: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    each = gamma.new_empty(*x.shape[:3])
    return channels_second(channels_last(x.new_empty(x.shape))), each, each.new_empty(each.shape)


@torch.library.custom_op("fednorm::group_norm_grad_parts", mutates_args=())
def group_norm_grad_parts(
    x: Tensor, dy: Tensor, mean: Tensor, inverse: Tensor, gamma: Tensor, groups: int,
    y: Tensor | None = None, masked: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As `group_norm_grad`, gradients of gamma and beta as (client, image, channel), to be summed over the images."""
    if _group_kernels_fit(x, groups):
        from fednorm.engines.stack.kernels.group_norm import run_group_norm_grad

        outer = None if y is None else channels_last(y)
        dx, dgamma, dbeta, through = run_group_norm_grad(
            channels_last(x), channels_last(dy), mean, inverse, gamma, groups, y=outer, masked=masked
        )
        return channels_second(dx), dgamma, dbeta, channels_second(through) if masked else through
    dz = dy if y is None else torch.where(y <= 0, 0, dy)
    grad, hat = dz.to(gamma.dtype), (x.to(gamma.dtype) - _spread(mean)) * _spread(inverse)
    scaled = grad * _spread(gamma[:, None])
    level, slope = _by_group(scaled.mean((3, 4)), groups), _by_group((scaled * hat).mean((3, 4)), groups)
    dx = _spread(inverse) * (scaled - _spread(level) - hat * _spread(slope))
    through = channels_second(channels_last(dz)) if masked else dy.new_empty(0)
    return channels_second(channels_last(dx.to(x.dtype))), (grad * hat).sum((3, 4)), grad.sum((3, 4)), through


@torch.library.custom_op("fednorm::group_norm_grad", mutates_args=())
def group_norm_grad(
    x: Tensor, dy: Tensor, mean: Tensor, inverse: Tensor, gamma: Tensor, groups: int,
    y: Tensor | None = None, masked: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, gamma and beta; with y, the output of a ReLU after the norm, dy is that ReLU's gradient.

    The last is dy behind the ReLU, where `masked` asks for it, else empty.
    """
    dx, dgamma, dbeta, through = group_norm_grad_parts(x, dy, mean, inverse, gamma, groups, y, masked)
    return dx, dgamma.sum(1), dbeta.sum(1), through


def _norm_grads(x: Tensor, dy: Tensor, gamma: Tensor, masked: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What they return, without its numbers; gamma as its gradient is."""
    through = channels_second(channels_last(dy.new_empty(dy.shape))) if masked else dy.new_empty(0)
    dx = channels_second(channels_last(x.new_empty(x.shape)))
    return dx, gamma.new_empty(gamma.shape), gamma.new_empty(gamma.shape), through


@group_norm_grad.register_fake
def _(
    x: Tensor, dy: Tensor, mean: Tensor, inverse: Tensor, gamma: Tensor, groups: int,
    y: Tensor | None = None, masked: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _norm_grads(x, dy, gamma, masked)


@group_norm_grad_parts.register_fake
def _(
    x: Tensor, dy: Tensor, mean: Tensor, inverse: Tensor, gamma: Tensor, groups: int,
    y: Tensor | None = None, masked: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _norm_grads(x, dy, gamma.new_empty(x.shape[:3]), masked)


@torch.library.custom_op("fednorm::linear", mutates_args=())
def linear(x: Tensor, w: Tensor) -> Tensor:
    """x (client, row, in) times each client's weights (client, out, in), in the type of x."""
    return torch.bmm(x, w.to(x.dtype).mT)


@linear.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:2], w.shape[1])


@torch.library.custom_op("fednorm::linear_input_grad", mutates_args=())
def linear_input_grad(dy: Tensor, w: Tensor) -> Tensor:
    """The gradient of a linear layer's input."""
    return torch.bmm(dy, w.to(dy.dtype))


@linear_input_grad.register_fake
def _(dy: Tensor, w: Tensor) -> Tensor:
    return dy.new_empty(*dy.shape[:2], w.shape[2])


@torch.library.custom_op("fednorm::linear_weight_grad", mutates_args=())
def linear_weight_grad(x: Tensor, dy: Tensor) -> Tensor:
    """The gradient of a linear layer's weights (client, out, in), in the type of the master weights."""
    wide = master_type(x)
    if x.is_cuda and x.dtype != wide:
        return torch.bmm(dy.mT, x, out_dtype=wide)
    return torch.bmm(dy.mT.to(wide), x.to(wide))


@linear_weight_grad.register_fake
def _(x: Tensor, dy: Tensor) -> Tensor:
    return x.new_empty(len(x), dy.shape[2], x.shape[2], dtype=master_type(x))
