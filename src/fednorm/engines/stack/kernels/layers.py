"""Layers whose mapping over clients (`torch.vmap`) is one operator of `kernels.ops` or `kernels.element_ops`.

Outside a mapping they are torch's own.
"""

# The vmap rules name their arguments, where torch's base class has *args; applying a Function has no useful type.
# pyright: reportIncompatibleMethodOverride=false, reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.grad import conv2d_input, conv2d_weight
from torch.nn.modules.batchnorm import _BatchNorm

from fednorm.engines.stack.kernels import element_ops, ops
from fednorm.layers.keyed import KeyedDropout, dropped

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


class _Conv(torch.autograd.Function):
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


class _Norm(torch.autograd.Function):
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


class _Dropout(torch.autograd.Function):
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
        return _Dropout.apply(grads[0], *ctx.saved_tensors, ctx.p), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, key: Tensor, p: float) -> Any:
        return element_ops.dropout(*stacked(info, in_dims, x, key), p), 0


class _MaxPool(torch.autograd.Function):
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


class StackConv2d(nn.Conv2d):
    """A Conv2d whose mapping over clients is one kernel."""

    narrow: torch.dtype | None = None
    dense = False

    def forward(self, input: Tensor) -> Tensor:
        x = input if self.narrow is None else input.to(self.narrow)
        y: Any = _Conv.apply(x, self.weight, self.stride[0], tuple(self.padding))
        if self.dense:
            y = y.contiguous()
        return y if self.bias is None else y + self.bias.to(y.dtype).view(-1, 1, 1)


class StackBatchNorm2d(nn.BatchNorm2d):
    """A BatchNorm2d whose pass over a stack of clients is one kernel, or two."""

    def forward(self, input: Tensor) -> Tensor:
        mean, var, counter = self.running_mean, self.running_var, self.num_batches_tracked
        # Models that are only tested are not mapped; there torch's own is faster.
        tested = not self.training and not torch.is_grad_enabled()
        if tested or mean is None or var is None or counter is None or self.weight is None or self.momentum is None:
            return super().forward(input)
        args = input, self.weight, self.bias, mean, var, counter
        y, _, _, *moved = cast(Any, _Norm.apply(*args, self.training, self.momentum, self.eps))
        if self.training:
            for kept, new in zip((mean, var, counter), moved, strict=True):
                kept.copy_(new)
        return y


class StackGlobalPool(nn.AdaptiveAvgPool2d):
    """A mean over all pixels; torch's own cannot be mapped over channels-last activations without a loop."""

    def forward(self, input: Tensor) -> Tensor:
        return input.mean((-2, -1), keepdim=True)


class StackMaxPool(nn.MaxPool2d):
    """Maxima of windows side by side, in one pass; which was the largest is found again for the gradient."""

    dense = False

    def forward(self, input: Tensor) -> Tensor:
        y: Any = _MaxPool.apply(input, _side(self))
        return y.contiguous() if self.dense else y


class StackDropout(KeyedDropout):
    """A keyed dropout in one pass, forward and backward."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p in (0, 1):
            return super().forward(x)
        return _Dropout.apply(x, self.next_key(), self.p)


def use_kernels(model: nn.Module, narrow: torch.dtype | None = None) -> int:
    """Let plain convolutions, batch norms, poolings and dropouts run as stack operators; returns how many changed.

    Only exact types change: a subclass may compute something else. Tensors and keys stay. With `narrow` (bfloat16)
    convolutions round their inputs and hand on what is narrow; every other layer with parameters is given its own
    type, so any model runs.
    """
    # Torch's own batch norm cannot be mapped over channels-last activations (torch 2.11 to 2.13).
    dense = any(isinstance(m, _BatchNorm) and type(m) is not nn.BatchNorm2d for m in model.modules())
    changed = 0
    for module in model.modules():
        if _is_plain(module):
            module.__class__ = StackConv2d
            vars(module).update(narrow=narrow, dense=dense)
        elif type(module) is nn.BatchNorm2d:
            module.__class__ = StackBatchNorm2d
        elif type(module) is nn.AdaptiveAvgPool2d and module.output_size in (1, (1, 1)):
            module.__class__ = StackGlobalPool
        elif type(module) is nn.MaxPool2d and _side(module):
            module.__class__ = StackMaxPool
            vars(module).update(dense=dense)
        elif type(module) is KeyedDropout and module.spatial == 0:
            module.__class__ = StackDropout
        else:
            if narrow is not None and next(module.parameters(recurse=False), None) is not None:
                module.register_forward_pre_hook(_widen)
            continue
        changed += 1
    return changed


def _widen(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give a layer its inputs in the type of its parameters."""
    wide = next(module.parameters(recurse=False)).dtype
    return tuple(a.to(wide) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)


def can_narrow(model: nn.Module) -> bool:
    """Whether a model has a convolution that can round its inputs."""
    return any(map(_is_plain, model.modules()))


def _is_plain(conv: nn.Module) -> bool:
    return (
        type(conv) is nn.Conv2d
        and conv.groups == 1
        and conv.dilation == (1, 1)
        and conv.stride[0] == conv.stride[1]
        and not isinstance(conv.padding, str)
        and conv.padding_mode == "zeros"
    )


def _side(pool: nn.MaxPool2d) -> int:
    """The side of a pooling's square windows that lie side by side; 0 for any other pooling."""
    side, stride = pool.kernel_size, pool.stride
    sides = {*(side if isinstance(side, tuple) else (side,)), *(stride if isinstance(stride, tuple) else (stride,))}
    bare = pool.padding in (0, (0, 0)) and pool.dilation in (1, (1, 1)) and not (pool.ceil_mode or pool.return_indices)
    return sides.pop() if bare and len(sides) == 1 else 0
