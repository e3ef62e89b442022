"""Layers whose mapping over clients (`torch.vmap`) is one operator of a stack; elsewhere they are torch's own."""

# Applying a Function has no useful type.
# pyright: reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from fednorm.engines.stack.kernels import mapped, ops
from fednorm.engines.stack.kernels.swapped import Swapped
from fednorm.layers.fixup import ShiftedConv2d
from fednorm.layers.keyed import KeyedDropout
from fednorm.layers.sample_norms import InstanceNorm
from fednorm.layers.ws_conv import WSConv2d

WORTH_ROUNDING = 4096
"""Weights of a linear layer from which on a narrow type pays; a small head keeps its own."""


def _convolve(self: nn.Conv2d, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What a convolution does with the input and the weight that its `forward` has made ready."""
    layer = cast(Swapped, self)
    x = input if layer.narrow is None else input.to(layer.narrow)
    numbers = self.stride[0], tuple(self.padding)
    if self.groups == 1:
        y: Any = mapped.Conv.apply(x, weight, *numbers)
    else:
        y = mapped.Depthwise.apply(x, weight, *numbers, self.dilation[0])
    y = y.contiguous() if layer.dense else y
    return y if bias is None else y + bias.to(y.dtype).view(-1, 1, 1)


class StackConv2d(nn.Conv2d, Swapped):
    """A Conv2d, or one with a filter for each channel, whose mapping over clients is one kernel."""

    _conv_forward = _convolve


class StackWSConv2d(WSConv2d, Swapped):
    """The same of weights that are standardised first, by another kernel."""

    _conv_forward = _convolve

    def standardised(self, weight: Tensor) -> Tensor:
        return cast(Any, mapped.Standardise.apply(weight, *self.numbers))


class StackShiftedConv2d(ShiftedConv2d, Swapped):
    """The same of a shifted input."""

    _conv_forward = _convolve


_CONVOLUTIONS: dict[type[nn.Module], type[nn.Conv2d]] = {
    nn.Conv2d: StackConv2d,
    WSConv2d: StackWSConv2d,
    ShiftedConv2d: StackShiftedConv2d,
}


class StackBatchNorm2d(nn.BatchNorm2d, Swapped):
    """A BatchNorm2d whose pass over a stack of clients is one kernel, or two."""

    def forward(self, input: Tensor) -> Tensor:
        return _batch_norm(self, input) if _fits(self) else super().forward(input)


class StackBatchNorm1d(nn.BatchNorm1d, Swapped):
    """A BatchNorm1d of vectors, which are images of one pixel, or of sequences, which are one pixel high."""

    def forward(self, input: Tensor) -> Tensor:
        if not _fits(self):
            return super().forward(input)
        images = input.reshape(*input.shape, *(1,) * (4 - input.dim()))
        return _batch_norm(self, images).reshape(input.shape)


def _fits(norm: _BatchNorm) -> bool:
    """Whether a stack operator does what this norm does now."""
    # Models that are only tested are not mapped; there torch's own is faster.
    tested = not norm.training and not torch.is_grad_enabled()
    return not tested and (norm.running_mean is None or norm.momentum is not None)


def _batch_norm(norm: _BatchNorm, images: Tensor) -> Tensor:
    mean, var, counter = norm.running_mean, norm.running_var, norm.num_batches_tracked
    wide = ops.master_type(images)
    scale = images.new_ones(norm.num_features, dtype=wide) if norm.weight is None else norm.weight
    shift = torch.zeros_like(scale) if norm.bias is None else norm.bias
    dense = cast(Swapped, norm).dense
    if mean is None or var is None or counter is None:
        none = torch.zeros_like(scale), torch.ones_like(scale), images.new_zeros((), dtype=torch.int64)
        y, *_ = cast(Any, mapped.Norm.apply(images, scale, shift, *none, True, 0.0, norm.eps))
        return y.contiguous() if dense else y
    args = images, scale, shift, mean, var, counter
    y, _, _, *moved = cast(Any, mapped.Norm.apply(*args, norm.training, norm.momentum, norm.eps))
    if norm.training:
        for kept, new in zip((mean, var, counter), moved, strict=True):
            kept.copy_(new)
    return y.contiguous() if dense else y


class StackGroupNorm(nn.GroupNorm, Swapped):
    """A GroupNorm of images whose pass over a stack of clients is one kernel."""

    def forward(self, input: Tensor) -> Tensor:
        return _group_norm(self, input) if _has_groups(self, input) else super().forward(_as_its_weight(self, input))


class StackInstanceNorm(InstanceNorm, Swapped):
    """The same with a group for each channel; maps of one pixel are refused as ever."""

    def forward(self, input: Tensor) -> Tensor:
        if input.shape[2:].numel() > 1 and _has_groups(self, input):
            return _group_norm(self, input)
        return super().forward(_as_its_weight(self, input))


def _has_groups(norm: nn.GroupNorm, x: Tensor) -> bool:
    """Whether the stack operator does what this norm does with an input."""
    tested = not norm.training and not torch.is_grad_enabled()
    return not tested and x.dim() == 4 and norm.weight is not None


def _group_norm(norm: nn.GroupNorm, images: Tensor) -> Tensor:
    y: Any = mapped.GroupNorm.apply(images, norm.weight, norm.bias, norm.num_groups, norm.eps)[0]
    return y.contiguous() if cast(Swapped, norm).dense else y


def _as_its_weight(norm: nn.GroupNorm, x: Tensor) -> Tensor:
    return x if norm.weight is None else x.to(norm.weight.dtype)


class StackLinear(nn.Linear, Swapped):
    """A Linear in a narrow type: a product of a stack reads weights that were rounded once for all layers."""

    def forward(self, input: Tensor) -> Tensor:
        x = input if self.narrow is None else input.to(self.narrow)
        y: Any = mapped.Linear.apply(x.reshape(-1, x.shape[-1]), self.weight).reshape(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class StackGlobalPool(nn.AdaptiveAvgPool2d, Swapped):
    """A mean over all pixels; torch's own cannot be mapped over channels-last activations without a loop."""

    def forward(self, input: Tensor) -> Tensor:
        return input.mean((-2, -1), keepdim=True)


class StackMaxPool(nn.MaxPool2d, Swapped):
    """Maxima of windows side by side, in one pass; which was the largest is found again for the gradient."""

    def forward(self, input: Tensor) -> Tensor:
        y: Any = mapped.MaxPool.apply(input, _side(self))
        return y.contiguous() if self.dense else y


class StackDropout(KeyedDropout, Swapped):
    """A keyed dropout in one pass, forward and backward."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p in (0, 1):
            return super().forward(x)
        return mapped.Dropout.apply(x, self.next_key(), self.p)


def kernels_pay(device: torch.device, precision: str) -> bool:
    """Whether there are kernels for a stack's layers, and they are faster than torch's own."""
    # Float32 without tf32 has no tensor cores to run on; there cuDNN's grouped convolutions are the faster ones.
    return device.type == "cuda" and ops.HAS_TRITON and precision != "fp32"


def use_kernels(model: nn.Module, narrow: torch.dtype | None = None) -> int:
    """Let plain layers of the types above run as stack operators; returns how many changed.

    Only exact types change: a subclass may compute something else. Tensors and keys stay. With `narrow` (bfloat16)
    convolutions and large linear layers round their inputs and hand on what is narrow; every other layer with
    parameters is given its own type, so any model runs, and the model's output is as wide as without.
    """
    # Torch's own batch norm cannot be mapped over channels-last activations (torch 2.11 to 2.13).
    dense = any(isinstance(m, _BatchNorm) and type(m) not in (nn.BatchNorm1d, nn.BatchNorm2d) for m in model.modules())
    changed = 0
    for module in model.modules():
        if _is_plain(module) or _is_depthwise(module):
            module.__class__ = _CONVOLUTIONS[type(module)]
            vars(module).update(narrow=narrow, dense=dense)
        elif type(module) is nn.BatchNorm2d:
            module.__class__ = StackBatchNorm2d
        elif type(module) is nn.BatchNorm1d:
            module.__class__ = StackBatchNorm1d
        elif type(module) is nn.GroupNorm:
            module.__class__ = StackGroupNorm
        elif type(module) is InstanceNorm:
            module.__class__ = StackInstanceNorm
        elif narrow is not None and _is_large(module):
            module.__class__ = StackLinear
            vars(module).update(narrow=narrow)
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
    if narrow is not None:
        model.register_forward_hook(_widen_output)
    return changed


def _widen(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give a layer its inputs in the type of its parameters."""
    wide = next(module.parameters(recurse=False)).dtype
    return tuple(a.to(wide) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)


def _widen_output(model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """What a model hands to its loss, which sums exponentials, in the type of the master weights."""
    narrow = (torch.bfloat16, torch.float16)
    return tree_map_only(Tensor, lambda out: out.float() if out.dtype in narrow else out, output)


def can_narrow(model: nn.Module) -> bool:
    """Whether a model has a layer that can round its inputs."""
    return any(_is_plain(module) or _is_depthwise(module) or _is_large(module) for module in model.modules())


def _is_large(linear: nn.Module) -> bool:
    return type(linear) is nn.Linear and linear.weight.numel() >= WORTH_ROUNDING


def _is_plain(conv: nn.Module) -> bool:
    return _is_even(conv) and conv.groups == 1 and conv.dilation == (1, 1)


def _is_depthwise(conv: nn.Module) -> bool:
    return _is_even(conv) and 1 < conv.groups == conv.in_channels == conv.out_channels and len(set(conv.dilation)) == 1


def _is_even(conv: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Whether this is a convolution with one step in both directions and zeros around, as many on either side."""
    return (
        isinstance(conv, nn.Conv2d)
        and type(conv) in _CONVOLUTIONS
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


def filters_lie_channels_last(model: nn.Module) -> bool:
    """Whether filters are best laid out as the stack's kernels read them."""
    kinds = tuple(_CONVOLUTIONS.values())
    return any(isinstance(module, kinds) and module.groups == 1 for module in model.modules())
