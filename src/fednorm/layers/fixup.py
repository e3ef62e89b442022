"""FixUp: residual networks that train without norms by their initialisation and a few scalars (Zhang et al. 2019).

A scalar bias sits before each convolution of a branch, each ReLU and the classifier, a scalar factor after the last
convolution of each branch; a shortcut that computes something sees the branch's first bias too. The last convolution of
a branch and the classifier start at zero (arXiv 1901.09321). What the paper leaves open is as in its authors' code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from fednorm.core.surgery import SurgeryReport
from fednorm.errors import ConfigError
from fednorm.layers.rebuild import rebuild_conv, rebuild_linear, refuse_special_conv
from fednorm.layers.residual import ResidualBlock, ZeroPadShortcut
from fednorm.layers.swapping import substitute, swap_norms


def _scalar(value: float) -> nn.Parameter:
    return nn.Parameter(torch.full((1,), value))


class ScalarBias(nn.Module):
    """y = x + b with one learned number b."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = _scalar(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class ScalarAffine(ScalarBias):
    """y = a * x + b with two learned numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = _scalar(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class ShiftedConv2d(nn.Conv2d):
    """A convolution of x + s with one learned number s; the padding stays zero."""

    shift: nn.Parameter

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input + self.shift, self.weight, self.bias)


class ShiftedLinear(nn.Linear):
    """A linear layer on x + s with one learned number s."""

    shift: nn.Parameter

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input + self.shift, self.weight, self.bias)


class FixupBlock(ResidualBlock):
    """A residual block whose shortcut starts from the input plus the first bias of the branch, as the branch does.

    It takes over the modules of the block it replaces, keys and all.
    """

    def __init__(self, block: ResidualBlock, first: str) -> None:
        super().__init__()
        self._modules.update(block._modules)
        self._main = type(block).main
        self._first = first

    def main(self, x: Tensor) -> Tensor:
        return self._main(self, x)

    def forward(self, x: Tensor) -> Tensor:
        shift = cast(ShiftedConv2d, self.get_submodule(self._first)).shift
        return self.relu(self.main(x) + self.shortcut(x + shift))


@dataclass(frozen=True)
class ToFixup:
    """Turn a residual network into its FixUp form and initialise it; without residual blocks nothing changes.

    With L blocks of m convolutions, all but the last convolution of a branch get the deviation
    sqrt(2 / (C_out k k)) * L^(-1/(2m-2)), a shortcut's the same without L, and those before the first block 1 over the
    root of three times their fan-in, which is torch's default. The weights drawn already are rescaled, so the run's
    seed still decides them. Shortcuts without parameters append their zero channels.
    """

    def __call__(self, model: nn.Module) -> tuple[nn.Module, SurgeryReport]:
        blocks = [module for module in model.modules() if isinstance(module, ResidualBlock)]
        if not blocks:
            return model, SurgeryReport(0, (), "residual block")
        on_shortcut = {module for block in blocks for module in block.shortcut.modules()}
        branches = {block: _branch(block, on_shortcut) for block in blocks}
        last_of_branch: set[nn.Module] = set()
        for block, convs in branches.items():
            norms = [m for m in block.modules() if isinstance(m, _BatchNorm) and m not in on_shortcut]
            last_of_branch.update(norms[-1:])
            _initialise_branch(list(convs.values()), len(blocks))
        for conv in on_shortcut:
            if isinstance(conv, nn.Conv2d):
                _rescale(conv, _he_spread(conv))
        for conv in _before_first_block(model):
            _rescale(conv, 1 / math.sqrt(3 * conv.weight[0].numel()))

        def make_scalars(name: str, old: _BatchNorm) -> nn.Module:
            if old in on_shortcut:
                return nn.Identity()
            return ScalarAffine() if old in last_of_branch else ScalarBias()

        def make_block(name: str, module: nn.Module) -> nn.Module:
            old = cast(ResidualBlock, module)
            return FixupBlock(old, next(iter(branches[old]))).train(old.training)

        in_branches = {conv for convs in branches.values() for conv in convs.values()}
        model, report = swap_norms(model, make_scalars, lambda new: "FixUp scalars", keep_statistics=False)
        model, _ = substitute(model, in_branches.__contains__, _shift_conv)
        model, _ = substitute(model, lambda m: isinstance(m, ZeroPadShortcut), _append_zeros)
        computing = {block for block in branches if branches[block] and not isinstance(block.shortcut, nn.Identity)}
        model, _ = substitute(model, computing.__contains__, make_block)
        classifier = [module for module in model.modules() if isinstance(module, nn.Linear)][-1:]
        model, _ = substitute(model, lambda m: m in classifier, _shift_linear)
        note = f"{len(blocks)} residual branches start at zero, as does the classifier"
        return model, SurgeryReport(len(blocks), (*report.notes, note))


def _branch(block: ResidualBlock, on_shortcut: set[nn.Module]) -> dict[str, nn.Conv2d]:
    """The convolutions of a block's branch by their names in it, in the order of registration."""
    found = block.named_modules()
    return {name: module for name, module in found if isinstance(module, nn.Conv2d) and module not in on_shortcut}


def _before_first_block(model: nn.Module) -> Iterator[nn.Conv2d]:
    """The convolutions of the stem, by the order of registration."""
    for module in model.modules():
        if isinstance(module, ResidualBlock):
            return
        if isinstance(module, nn.Conv2d):
            yield module


def _he_spread(conv: nn.Conv2d) -> float:
    return math.sqrt(2 / (conv.out_channels * math.prod(conv.kernel_size)))


def _rescale(conv: nn.Conv2d, spread: float) -> None:
    drawn = conv.weight.detach().std()
    if not drawn > 0:
        raise ConfigError(
            "FixUp rescales weights that were drawn at random, but a convolution is constant; use a new model"
        )
    with torch.no_grad():
        conv.weight.mul_(spread / drawn)


def _initialise_branch(convs: list[nn.Conv2d], num_blocks: int) -> None:
    for conv in convs[:-1]:
        _rescale(conv, _he_spread(conv) * num_blocks ** (-1 / (2 * len(convs) - 2)))
        if conv.bias is not None:
            nn.init.zeros_(conv.bias)
    for conv in convs[-1:]:
        for tensor in conv.parameters():
            nn.init.zeros_(tensor)


def _append_zeros(name: str, module: nn.Module) -> nn.Module:
    old = cast(ZeroPadShortcut, module)
    return ZeroPadShortcut(old.stride, 0, old.before + old.after).train(old.training)


def _shift_conv(name: str, module: nn.Module) -> nn.Module:
    old = cast(nn.Conv2d, module)
    refuse_special_conv(name, old)
    return _with_shift(rebuild_conv(ShiftedConv2d, old))


def _shift_linear(name: str, module: nn.Module) -> nn.Module:
    old = cast(nn.Linear, module)
    for tensor in old.parameters():
        nn.init.zeros_(tensor)
    return _with_shift(rebuild_linear(ShiftedLinear, old))


def _with_shift(layer: ShiftedConv2d | ShiftedLinear) -> nn.Module:
    layer.shift = nn.Parameter(layer.weight.new_zeros(1))
    return layer


_SCALARS = (ScalarBias, ShiftedConv2d, ShiftedLinear)


@dataclass(frozen=True)
class FixupRates:
    """The learning-rate factor of each scalar and bias, by key; the published code trains them ten times slower.

    Empty for a model that is not in FixUp form.
    """

    scalar_lr: float = 0.1

    def __call__(self, model: nn.Module) -> dict[str, float]:
        if not any(isinstance(module, _SCALARS) for module in model.modules()):
            return {}
        factors: dict[str, float] = {}
        for layer, module in model.named_modules():
            for part, tensor in module.named_parameters(recurse=False):
                weights = isinstance(module, nn.Conv2d | nn.Linear) and tensor is module.weight
                if not weights:
                    factors[f"{layer}.{part}" if layer else part] = self.scalar_lr
        return factors
