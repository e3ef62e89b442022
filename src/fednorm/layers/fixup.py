"""FixUp: residual networks that train without norms by their initialisation and a few scalars (Zhang et al. 2019).

A scalar bias sits before each convolution, each ReLU and the classifier, a scalar factor after the last convolution of
each branch. The last convolution of a branch and the classifier start at zero (arXiv 1901.09321).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from fednorm.core.surgery import SurgeryReport
from fednorm.errors import ConfigError
from fednorm.layers.rebuild import rebuild_conv, rebuild_linear, refuse_special_conv
from fednorm.layers.residual import ResidualBlock
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


@dataclass(frozen=True)
class ToFixup:
    """Turn a residual network into its FixUp form and initialise it; without residual blocks nothing changes.

    With L blocks of m convolutions, all but the last convolution of a branch get the deviation
    sqrt(2 / (C_out k k)) * L^(-1/(2m-2)): the weights drawn already are rescaled, so the run's seed still decides them.
    """

    def __call__(self, model: nn.Module) -> tuple[nn.Module, SurgeryReport]:
        blocks = [module for module in model.modules() if isinstance(module, ResidualBlock)]
        if not blocks:
            return model, SurgeryReport(0, (), "residual block")
        on_shortcut = {module for block in blocks for module in block.shortcut.modules()}
        last_of_branch: set[nn.Module] = set()
        for block in blocks:
            norms = [m for m in block.modules() if isinstance(m, _BatchNorm) and m not in on_shortcut]
            last_of_branch.update(norms[-1:])
            _initialise_branch(
                [m for m in block.modules() if type(m) is nn.Conv2d and m not in on_shortcut], len(blocks)
            )

        def make_scalars(name: str, old: _BatchNorm) -> nn.Module:
            if old in on_shortcut:
                return nn.Identity()
            return ScalarAffine() if old in last_of_branch else ScalarBias()

        in_blocks = {module for block in blocks for module in block.modules()}
        model, report = swap_norms(model, make_scalars, lambda new: "FixUp scalars", keep_statistics=False)
        model, _ = substitute(model, lambda m: isinstance(m, nn.Conv2d) and m in in_blocks, _shift_conv)
        classifier = [module for module in model.modules() if isinstance(module, nn.Linear)][-1:]
        model, _ = substitute(model, lambda m: m in classifier, _shift_linear)
        note = f"{len(blocks)} residual branches start at zero, as does the classifier"
        return model, SurgeryReport(len(blocks), (*report.notes, note))


def _initialise_branch(convs: list[nn.Conv2d], num_blocks: int) -> None:
    for conv in convs[:-1]:
        spread = conv.weight.detach().std()
        if not spread > 0:
            raise ConfigError(
                "FixUp rescales weights that were drawn at random, but a convolution is constant; use a new model"
            )
        wanted = math.sqrt(2 / (conv.out_channels * math.prod(conv.kernel_size)))
        if conv.bias is not None:
            nn.init.zeros_(conv.bias)
        with torch.no_grad():
            conv.weight.mul_(wanted * num_blocks ** (-1 / (2 * len(convs) - 2)) / spread)
    for conv in convs[-1:]:
        for tensor in conv.parameters():
            nn.init.zeros_(tensor)


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
