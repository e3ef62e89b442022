"""Networks without normalization layers: what to remove, and what keeps the signal at its size (FedWon)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from fednorm.core.surgery import SurgeryReport
from fednorm.errors import unknown
from fednorm.layers.rebuild import rebuild_linear
from fednorm.layers.residual import ResidualBlock
from fednorm.layers.swapping import SwapNorm, substitute


@dataclass(frozen=True)
class DropNorms(SwapNorm):
    """Every BatchNorm becomes the identity; with `bias`, convolutions without one get it, since beta is gone.

    Which convolution feeds which norm cannot be known without running the model, so all of them do, as those of a
    BatchNorm network all feed one.
    """

    bias: bool = True

    def make(self, name: str, old: _BatchNorm) -> nn.Module:
        return nn.Identity()

    def label(self, new: nn.Module) -> str:
        return "Identity"

    def __call__(self, model: nn.Module) -> tuple[nn.Module, SurgeryReport]:
        model, report = super().__call__(model)
        if not report.changed or not self.bias:
            return model, report
        bare = [m for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d) and m.bias is None]
        for conv in bare:
            conv.bias = nn.Parameter(conv.weight.new_zeros(conv.out_channels))
        return model, SurgeryReport(report.changed, (*report.notes, f"{len(bare)} convolutions gained a bias of zero"))


class NormFreeBlock(ResidualBlock):
    """A residual block relu(shortcut + alpha * main(x / beta)), beta^2 the variance x is expected to have.

    A shortcut that computes something (a stage transition) sees x / beta as well, which resets the variance to 1
    (Brock et al. 2021, arXiv 2101.08692). It takes over the modules of the block it replaces, keys and all.
    """

    def __init__(self, block: ResidualBlock, alpha: float, beta: float) -> None:
        super().__init__()
        self._modules.update(block._modules)
        self._main = type(block).main
        self.alpha = alpha
        self.beta = beta

    def main(self, x: Tensor) -> Tensor:
        return self._main(self, x)

    def forward(self, x: Tensor) -> Tensor:
        scaled = x / self.beta
        skipped = x if isinstance(self.shortcut, nn.Identity) else self.shortcut(scaled)
        return self.relu(skipped + self.alpha * self.main(scaled))


@dataclass(frozen=True)
class ScaleResiduals:
    """`nf` scales the residual branches as norm-free nets do; `plain` leaves the blocks as they are."""

    style: Literal["plain", "nf"] = "plain"
    alpha: float = 0.2

    def __post_init__(self) -> None:
        if self.style not in ("plain", "nf"):
            raise unknown("style of residual scaling", self.style, ("plain", "nf"))

    def __call__(self, model: nn.Module) -> tuple[nn.Module, SurgeryReport]:
        variance = 1.0

        def make(name: str, module: nn.Module) -> nn.Module:
            nonlocal variance
            old = cast(ResidualBlock, module)
            new = NormFreeBlock(old, self.alpha, math.sqrt(variance)).train(old.training)
            variance = (variance if isinstance(old.shortcut, nn.Identity) else 1.0) + self.alpha**2
            return new

        model, pairs = substitute(model, lambda module: self.style == "nf" and isinstance(module, ResidualBlock), make)
        note = f"{len(pairs)} residual branches scaled by {self.alpha} over their expected deviation"
        return model, SurgeryReport(len(pairs), (note,) if pairs else (), "residual block")


class FeatureNormLinear(nn.Linear):
    """A linear layer that sees its input at norm sqrt(dim): y = W (sqrt(d) x / |x|) + b.

    Feature normalization (Zhang et al., TMLR 2024), published as FedFN too (Kim et al. 2023).
    """

    def forward(self, input: Tensor) -> Tensor:
        unit = nn.functional.normalize(input, dim=-1)
        return nn.functional.linear(unit * math.sqrt(self.in_features), self.weight, self.bias)


@dataclass(frozen=True)
class NormaliseFeatures:
    """Normalise the features that enter the last Linear layer (in the order of registration), the classifier."""

    def __call__(self, model: nn.Module) -> tuple[nn.Module, SurgeryReport]:
        linears = [module for module in model.modules() if type(module) is nn.Linear]
        if not linears:
            return model, SurgeryReport(0, (), "linear layer")

        def make(name: str, module: nn.Module) -> nn.Module:
            return rebuild_linear(FeatureNormLinear, linears[-1])

        model, pairs = substitute(model, lambda module: module is linears[-1], make)
        return model, SurgeryReport(len(pairs), ("features are normalised before the last linear layer",))
