"""Networks without normalization layers: what to remove, and what keeps the signal at its size (FedWon)."""

from __future__ import annotations

import math
from typing import Literal, cast

from torch import Tensor, nn

from fednorm.errors import unknown
from fednorm.layers.rebuild import rebuild_linear
from fednorm.models.blocks import ResidualBlock
from fednorm.pieces.surgery import Surgery, SurgeryReport, substitute, swap_norm


def drop_norms(add_bias: bool = True) -> Surgery:
    """Every BatchNorm becomes the identity; convolutions without a bias get one, since beta is gone.

    Which convolution feeds which norm cannot be known without running the model, so all of them do, as those of a
    BatchNorm network all feed one.
    """
    remove = swap_norm(lambda name, old: nn.Identity(), "Identity")

    def operate(model: nn.Module) -> tuple[nn.Module, SurgeryReport]:
        model, report = remove(model)
        if not report.changed or not add_bias:
            return model, report
        bare = [m for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d) and m.bias is None]
        for conv in bare:
            conv.bias = nn.Parameter(conv.weight.new_zeros(conv.out_channels))
        return model, SurgeryReport(report.changed, (*report.notes, f"{len(bare)} convolutions gained a bias of zero"))

    return operate


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


def residual_scaling(style: Literal["plain", "nf"] = "plain", alpha: float = 0.2) -> Surgery:
    """`nf` scales the residual branches as norm-free nets do; `plain` leaves the blocks as they are."""
    if style not in ("plain", "nf"):
        raise unknown("style of residual scaling", style, ("plain", "nf"))

    def operate(model: nn.Module) -> tuple[nn.Module, SurgeryReport]:
        variance = 1.0

        def make(name: str, module: nn.Module) -> nn.Module:
            nonlocal variance
            old = cast(ResidualBlock, module)
            new = NormFreeBlock(old, alpha, math.sqrt(variance)).train(old.training)
            variance = (variance if isinstance(old.shortcut, nn.Identity) else 1.0) + alpha**2
            return new

        found = (lambda module: isinstance(module, ResidualBlock)) if style == "nf" else (lambda module: False)
        model, pairs = substitute(model, found, make)
        note = f"{len(pairs)} residual branches scaled by {alpha} over their expected deviation"
        return model, SurgeryReport(len(pairs), (note,) if pairs else (), "residual block")

    return operate


class FeatureNormLinear(nn.Linear):
    """A linear layer that sees its input at norm sqrt(dim): y = W (sqrt(d) x / |x|) + b.

    Feature normalization (Zhang et al., TMLR 2024), published as FedFN too (Kim et al. 2023).
    """

    def forward(self, input: Tensor) -> Tensor:
        unit = nn.functional.normalize(input, dim=-1)
        return nn.functional.linear(unit * math.sqrt(self.in_features), self.weight, self.bias)


def feature_norm(model: nn.Module) -> tuple[nn.Module, SurgeryReport]:
    """Normalise the features that enter the last Linear layer (in the order of registration), the classifier."""
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    if not linears:
        return model, SurgeryReport(0, (), "linear layer")

    def make(name: str, module: nn.Module) -> nn.Module:
        return rebuild_linear(FeatureNormLinear, linears[-1])

    model, pairs = substitute(model, lambda module: module is linears[-1], make)
    return model, SurgeryReport(len(pairs), ("features are normalised before the last linear layer",))
