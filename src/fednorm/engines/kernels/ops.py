"""Convolution and batch norm as operators with a rule for `torch.vmap`: over clients they run as one kernel.

Outside a mapping they are torch's own. Inside, on a GPU, the Triton kernels run; elsewhere the reference, which is
torch's grouped convolution.
"""

# The vmap rules name their arguments, where torch's base class has *args.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.grad import conv2d_input, conv2d_weight
from torch.nn.modules.batchnorm import _BatchNorm

Pair = tuple[int, int]


def _kernels_fit(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.float32, torch.bfloat16, torch.float16)


def _front(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    return tensor.movedim(dim, 0) if dim is not None else tensor.expand(size, *tensor.shape)


def _merge_groups(x: Tensor) -> Tensor:
    """(client, batch, channel, ...) as (batch, client * channel, ...)."""
    return x.transpose(0, 1).flatten(1, 2)


def _split_groups(y: Tensor, clients: int) -> Tensor:
    return y.unflatten(1, (clients, -1)).transpose(0, 1)


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
        (dy,) = grads
        size, kernel = tuple(x.shape[-2:]), tuple(w.shape[-2:])
        dx = _InputGrad.apply(dy, w, size, ctx.stride, ctx.padding) if ctx.needs_input_grad[0] else None
        return dx, _WeightGrad.apply(x, dy, kernel, ctx.stride, ctx.padding), None, None  # pyright: ignore[reportReturnType]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, w: Tensor, stride: int, padding: Pair):
        x, w = _front(x, in_dims[0], info.batch_size), _front(w, in_dims[1], info.batch_size)
        if _kernels_fit(x):
            from fednorm.engines.kernels.conv import conv_forward

            return conv_forward(x, w, stride, padding), 0
        y = functional.conv2d(_merge_groups(x), w.flatten(0, 1).to(x.dtype), None, stride, padding, 1, info.batch_size)
        return _split_groups(y, info.batch_size), 0


class _InputGrad(_FirstOrder):
    @staticmethod
    def forward(dy: Tensor, w: Tensor, size: Pair, stride: int, padding: Pair) -> Tensor:
        shape = (dy.shape[0], w.shape[1], *size)
        return conv2d_input(shape, w.to(dy.dtype), dy, stride, cast(int, padding))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], dy: Tensor, w: Tensor, size: Pair, stride: int, padding: Pair):
        clients = info.batch_size
        dy, w = _front(dy, in_dims[0], clients), _front(w, in_dims[1], clients)
        if _kernels_fit(dy):
            from fednorm.engines.kernels.conv import conv_input_grad

            return conv_input_grad(dy, w, size, stride, padding), 0
        shape = (dy.shape[1], clients * w.shape[2], *size)
        wide = w.flatten(0, 1).to(dy.dtype)
        dx = conv2d_input(shape, wide, _merge_groups(dy), stride, cast(int, padding), 1, clients)
        return _split_groups(dx, clients), 0


class _WeightGrad(_FirstOrder):
    @staticmethod
    def forward(x: Tensor, dy: Tensor, kernel: Pair, stride: int, padding: Pair) -> Tensor:
        shape = (dy.shape[1], x.shape[1], *kernel)
        return conv2d_weight(x, shape, dy, stride, cast(int, padding)).to(_master(x))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, dy: Tensor, kernel: Pair, stride: int, padding: Pair
    ):
        clients = info.batch_size
        x, dy = _front(x, in_dims[0], clients), _front(dy, in_dims[1], clients)
        if _kernels_fit(x):
            from fednorm.engines.kernels.conv import conv_weight_grad

            return conv_weight_grad(x, dy, kernel, stride, padding), 0
        shape = (clients * dy.shape[2], x.shape[2], *kernel)
        dw = conv2d_weight(_merge_groups(x), shape, _merge_groups(dy), stride, cast(int, padding), 1, clients)
        return dw.unflatten(0, (clients, -1)).to(_master(x)), 0


def _master(x: Tensor) -> torch.dtype:
    """The type gradients of weights have: that of the master weights, also where activations are narrower."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class _Norm(torch.autograd.Function):
    """y, mean and biased variance; the statistics carry no gradient of their own."""

    @staticmethod
    def forward(x: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        wide = x.to(gamma.dtype)
        var, mean = torch.var_mean(wide, (0, 2, 3), correction=0)
        hat = (wide - _channels(mean)) * _channels((var + eps).rsqrt())
        return (hat * _channels(gamma) + _channels(beta)).to(x.dtype), mean, var

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        x, gamma, _, ctx.eps = inputs
        _, mean, var = output
        ctx.mark_non_differentiable(mean, var)
        ctx.save_for_backward(x, gamma, mean, var)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, gamma, mean, var = ctx.saved_tensors
        return (*_NormGrad.apply(x, grads[0], mean, var, gamma, ctx.eps), None)  # pyright: ignore[reportGeneralTypeIssues]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, gamma: Tensor, beta: Tensor, eps: float):
        x, gamma, beta = (_front(t, d, info.batch_size) for t, d in zip((x, gamma, beta), in_dims, strict=False))
        if _kernels_fit(x):
            from fednorm.engines.kernels.conv import channels_last
            from fednorm.engines.kernels.norm import norm_forward

            y, mean, var = norm_forward(channels_last(x), gamma.contiguous(), beta.contiguous(), eps)
            return (y.permute(0, 1, 4, 2, 3), mean, var), (0, 0, 0)
        parts = [_Norm.forward(*each, eps) for each in zip(x, gamma, beta, strict=True)]
        y, mean, var = (torch.stack(each) for each in zip(*parts, strict=True))
        return (y, mean, var), (0, 0, 0)


class _NormGrad(_FirstOrder):
    @staticmethod
    def forward(x: Tensor, dy: Tensor, mean: Tensor, var: Tensor, gamma: Tensor, eps: float):
        wide, grad = x.to(gamma.dtype), dy.to(gamma.dtype)
        inverse = (var + eps).rsqrt()
        hat = (wide - _channels(mean)) * _channels(inverse)
        dgamma, dbeta = (grad * hat).sum((0, 2, 3)), grad.sum((0, 2, 3))
        count = wide.numel() // wide.shape[1]
        centred = grad - _channels(dbeta / count) - hat * _channels(dgamma / count)
        return (_channels(gamma * inverse) * centred).to(x.dtype), dgamma, dbeta

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        x: Tensor,
        dy: Tensor,
        mean: Tensor,
        var: Tensor,
        gamma: Tensor,
        eps: float,
    ):
        given = zip((x, dy, mean, var, gamma), in_dims, strict=False)
        x, dy, mean, var, gamma = (_front(t, d, info.batch_size) for t, d in given)
        if _kernels_fit(x):
            from fednorm.engines.kernels.conv import channels_last
            from fednorm.engines.kernels.norm import norm_backward

            stats = mean.contiguous(), var.contiguous(), gamma.contiguous()
            dx, dgamma, dbeta = norm_backward(channels_last(x), channels_last(dy), *stats, eps)
            return (dx.permute(0, 1, 4, 2, 3), dgamma, dbeta), (0, 0, 0)
        parts = [_NormGrad.forward(*each, eps) for each in zip(x, dy, mean, var, gamma, strict=True)]
        return tuple(torch.stack(each) for each in zip(*parts, strict=True)), (0, 0, 0)


def _channels(values: Tensor) -> Tensor:
    return values.view(1, -1, 1, 1)


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
    """A BatchNorm2d whose training pass over a stack of clients is two kernels."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.weight is None:
            return super().forward(input)
        y, mean, var = _Norm.apply(input, self.weight, self.bias, self.eps)  # pyright: ignore[reportGeneralTypeIssues]
        count = input.numel() // input.shape[1]
        counter, running_mean, running_var = self.num_batches_tracked, self.running_mean, self.running_var
        if counter is not None and running_mean is not None and running_var is not None:
            counter.add_(1)
            rate = self.momentum if self.momentum is not None else 1 / counter.to(mean.dtype)
            running_mean.add_(rate * (mean - running_mean))
            running_var.add_(rate * (var * (count / (count - 1)) - running_var))
        return y


def use_kernels(model: nn.Module, narrow: torch.dtype | None = None) -> int:
    """Let a model's plain convolutions and batch norms run as stack operators; returns how many changed.

    Only exact types change: a subclass may compute something else. Tensors and keys stay. With `narrow` (bfloat16)
    convolutions round their inputs and hand on what is narrow; every other layer with parameters is given its own
    type, so any model runs.
    """
    # Torch's own batch norm cannot be mapped over channels-last activations (torch 2.11 to 2.13).
    dense = any(isinstance(m, _BatchNorm) and type(m) is not nn.BatchNorm2d for m in model.modules())
    changed = 0
    for module in model.modules():
        if type(module) is nn.Conv2d and _plain(module):
            module.__class__ = StackConv2d
            vars(module).update(narrow=narrow, dense=dense)
        elif type(module) is nn.BatchNorm2d:
            module.__class__ = StackBatchNorm2d
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


def _plain(conv: nn.Conv2d) -> bool:
    return (
        conv.groups == 1
        and conv.dilation == (1, 1)
        and conv.stride[0] == conv.stride[1]
        and not isinstance(conv.padding, str)
        and conv.padding_mode == "zeros"
    )
