"""Functions whose mapping over clients (`torch.vmap`) is one operator of a stack, and so are their gradients.

Outside a mapping they are torch's own.
"""

# The vmap rules name their arguments, where torch's base class has *args; applying a Function has no useful type.
# pyright: reportIncompatibleMethodOverride=false, reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.grad import conv2d_input, conv2d_weight

from fednorm.engines.stack.kernels import depth_ops, element_ops, layer_ops, ops, weight_ops
from fednorm.layers.keyed import dropped
from fednorm.layers.ws_conv import Standard

Pair = tuple[int, int]


def stacked(info: Any, in_dims: tuple[Any, ...], *tensors: Any) -> list[Any]:
    """Arguments of a vmap rule with the client axis in front, also where they are common to all; None stays."""

    def in_front(tensor: Tensor | None, dim: int | None) -> Tensor | None:
        if tensor is None:
            return None
        return tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)

    return [in_front(tensor, dim) for tensor, dim in zip(tensors, in_dims, strict=False)]


class _FirstOrder(torch.autograd.Function):
    """An operator that is itself a derivative and has none of its own."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError("second derivatives of the stack operators are not available")


class Conv(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, w: Tensor, stride: int, padding: Pair) -> Tensor:
        return functional.conv2d(x, w.to(x.dtype), None, stride, padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, ctx.stride, ctx.padding = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        x, w = ctx.saved_tensors
        size, kernel = tuple(x.shape[-2:]), tuple(w.shape[-2:])
        dx = _InputGrad.apply(grads[0], w, size, ctx.stride, ctx.padding) if ctx.needs_input_grad[0] else None
        return dx, _WeightGrad.apply(x, grads[0], kernel, ctx.stride, ctx.padding), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, w: Tensor, stride: int, padding: Pair) -> Any:
        return ops.conv(*stacked(info, in_dims, x, w), stride, list(padding)), 0


class _InputGrad(_FirstOrder):
    @staticmethod
    def forward(dy: Tensor, w: Tensor, size: Pair, stride: int, padding: Pair) -> Tensor:
        shape = (dy.shape[0], w.shape[1], *size)
        return conv2d_input(shape, w.to(dy.dtype), dy, stride, cast(int, padding))

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], dy: Tensor, w: Tensor, size: Pair, stride: int, padding: Pair) -> Any:
        return ops.conv_input_grad(*stacked(info, dims, dy, w), list(size), stride, list(padding)), 0


class _WeightGrad(_FirstOrder):
    @staticmethod
    def forward(x: Tensor, dy: Tensor, kernel: Pair, stride: int, padding: Pair) -> Tensor:
        shape = (dy.shape[1], x.shape[1], *kernel)
        return conv2d_weight(x, shape, dy, stride, cast(int, padding)).to(ops.master_type(x))

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], x: Tensor, dy: Tensor, kernel: Pair, stride: int, padding: Pair) -> Any:
        return ops.conv_weight_grad(*stacked(info, dims, x, dy), list(kernel), stride, list(padding)), 0


class Depthwise(torch.autograd.Function):
    """A convolution of each channel with a filter of its own; the numbers are stride, padding and dilation."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, stride: int, padding: Pair, dilation: int) -> Tensor:
        return functional.conv2d(x, w.to(x.dtype), None, stride, padding, dilation, len(w))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, *ctx.numbers = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, w = ctx.saved_tensors
        size, kernel = tuple(x.shape[-2:]), tuple(w.shape[-2:])
        dx = _DepthwiseInputGrad.apply(grads[0], w, size, *ctx.numbers) if ctx.needs_input_grad[0] else None
        return dx, _DepthwiseWeightGrad.apply(x, grads[0], kernel, *ctx.numbers), None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], x: Tensor, w: Tensor, *numbers: Any) -> Any:
        return depth_ops.depthwise(*stacked(info, dims, x, w), *_listed(numbers)), 0


def _listed(numbers: tuple[Any, ...]) -> list[Any]:
    """Pairs as lists, which is what operators take."""
    return [list(each) if isinstance(each, tuple) else each for each in numbers]


class _DepthwiseInputGrad(_FirstOrder):
    @staticmethod
    def forward(dy: Tensor, w: Tensor, size: Pair, stride: int, padding: Pair, dilation: int) -> Tensor:
        shape = (*dy.shape[:2], *size)
        return conv2d_input(shape, w.to(dy.dtype), dy, stride, cast(int, padding), dilation, len(w))

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], dy: Tensor, w: Tensor, *numbers: Any) -> Any:
        return depth_ops.depthwise_input_grad(*stacked(info, dims, dy, w), *_listed(numbers)), 0


class _DepthwiseWeightGrad(_FirstOrder):
    @staticmethod
    def forward(x: Tensor, dy: Tensor, kernel: Pair, stride: int, padding: Pair, dilation: int) -> Tensor:
        channels = x.shape[1]
        dw = conv2d_weight(x, (channels, 1, *kernel), dy, stride, cast(int, padding), dilation, channels)
        return dw.to(ops.master_type(x))

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], x: Tensor, dy: Tensor, *numbers: Any) -> Any:
        return depth_ops.depthwise_weight_grad(*stacked(info, dims, x, dy), *_listed(numbers)), 0


class Standardise(torch.autograd.Function):
    """Weights with mean zero and a norm or deviation for each filter; the numbers are those of `Standard`."""

    @staticmethod
    def forward(w: Tensor, *numbers: float) -> Tensor:
        return Standard(*numbers)(w)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        w, *ctx.numbers = inputs
        ctx.save_for_backward(w)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (_StandardiseGrad.apply(*ctx.saved_tensors, grads[0], *ctx.numbers), *(None,) * len(ctx.numbers))

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], w: Tensor, *numbers: float) -> Any:
        return weight_ops.standardise(*stacked(info, dims, w), *numbers), 0


class _StandardiseGrad(_FirstOrder):
    @staticmethod
    def forward(w: Tensor, dy: Tensor, *numbers: float) -> Tensor:
        return weight_ops.standardise_grad(w.unsqueeze(0), dy.unsqueeze(0), *numbers).squeeze(0)

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], w: Tensor, dy: Tensor, *numbers: float) -> Any:
        return weight_ops.standardise_grad(*stacked(info, dims, w, dy), *numbers), 0


class Norm(torch.autograd.Function):
    """y, mean and biased variance, and the moved running statistics; only y has a gradient."""

    @staticmethod
    def forward(
        x: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, var: Tensor, counter: Tensor,
        training: bool, rate: float, eps: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        each = (t.unsqueeze(0) for t in (x, gamma, beta, mean, var, counter))
        return tuple(out.squeeze(0) for out in ops.norm(*each, training, rate, eps))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, gamma, *_, ctx.training, _, ctx.eps = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(x, gamma, *output[1:3])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, gamma, mean, var = ctx.saved_tensors
        return (*_NormGrad.apply(x, grads[0], mean, var, gamma, ctx.training, ctx.eps), *(None,) * 6)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return ops.norm(*stacked(info, in_dims, *args[:6]), *args[6:]), (0,) * 6


class _NormGrad(_FirstOrder):
    @staticmethod
    def forward(
        x: Tensor, dy: Tensor, mean: Tensor, var: Tensor, gamma: Tensor, training: bool, eps: float
    ) -> tuple[Tensor, ...]:
        each = (t.unsqueeze(0) for t in (x, dy, mean, var, gamma))
        return tuple(out.squeeze(0) for out in ops.norm_grad(*each, training, eps)[:3])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return ops.norm_grad(*stacked(info, in_dims, *args[:5]), *args[5:])[:3], (0,) * 3


class GroupNorm(torch.autograd.Function):
    """y, and the mean and inverse deviation of each channel of an image; only y has a gradient."""

    @staticmethod
    def forward(x: Tensor, gamma: Tensor, beta: Tensor, groups: int, eps: float) -> tuple[Tensor, ...]:
        each = (t.unsqueeze(0) for t in (x, gamma, beta))
        return tuple(out.squeeze(0) for out in layer_ops.group_norm(*each, groups, eps))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, gamma, _, ctx.groups, _ = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(x, gamma, *output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, gamma, mean, inverse = ctx.saved_tensors
        return (*_GroupNormGrad.apply(x, grads[0], mean, inverse, gamma, ctx.groups), None, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return layer_ops.group_norm(*stacked(info, in_dims, *args[:3]), *args[3:]), (0,) * 3


class _GroupNormGrad(_FirstOrder):
    @staticmethod
    def forward(x: Tensor, dy: Tensor, mean: Tensor, inverse: Tensor, gamma: Tensor, groups: int) -> tuple[Tensor, ...]:
        each = (t.unsqueeze(0) for t in (x, dy, mean, inverse, gamma))
        return tuple(out.squeeze(0) for out in layer_ops.group_norm_grad(*each, groups)[:3])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return layer_ops.group_norm_grad(*stacked(info, in_dims, *args[:5]), args[5])[:3], (0,) * 3


class Linear(torch.autograd.Function):
    """x (row, in) times weights (out, in)."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return functional.linear(x, w.to(x.dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor]:
        x, w = ctx.saved_tensors
        dx = _LinearInputGrad.apply(grads[0], w) if ctx.needs_input_grad[0] else None
        return dx, _LinearWeightGrad.apply(x, grads[0])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Tensor) -> Any:
        return layer_ops.linear(*stacked(info, in_dims, *args)), 0


class _LinearInputGrad(_FirstOrder):
    @staticmethod
    def forward(dy: Tensor, w: Tensor) -> Tensor:
        return dy @ w.to(dy.dtype)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Tensor) -> Any:
        return layer_ops.linear_input_grad(*stacked(info, in_dims, *args)), 0


class _LinearWeightGrad(_FirstOrder):
    @staticmethod
    def forward(x: Tensor, dy: Tensor) -> Tensor:
        wide = ops.master_type(x)
        return dy.mT.to(wide) @ x.to(wide)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Tensor) -> Any:
        return layer_ops.linear_weight_grad(*stacked(info, in_dims, *args)), 0


class Dropout(torch.autograd.Function):
    """Linear in x, so its gradient is the same operator on the gradient behind it: no mask is kept."""

    @staticmethod
    def forward(x: Tensor, key: Tensor, p: float) -> Tensor:
        return dropped(x, key, p, x.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, key, ctx.p = inputs
        ctx.save_for_backward(key)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return Dropout.apply(grads[0], *ctx.saved_tensors, ctx.p), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, key: Tensor, p: float) -> Any:
        return element_ops.dropout(*stacked(info, in_dims, x, key), p), 0


class MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, side: int) -> Tensor:
        return functional.max_pool2d(x, side)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.side = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _MaxPoolGrad.apply(*ctx.saved_tensors, grads[0], ctx.side), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, side: int) -> Any:
        return element_ops.max_pool(*stacked(info, in_dims, x), side), 0


class _MaxPoolGrad(_FirstOrder):
    @staticmethod
    def forward(x: Tensor, dy: Tensor, side: int) -> Tensor:
        return element_ops.max_pool_grad(x.unsqueeze(0), dy.unsqueeze(0), side).squeeze(0)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, dy: Tensor, side: int) -> Any:
        return element_ops.max_pool_grad(*stacked(info, in_dims, x, dy), side), 0
