"""A layer that only watches: what FedRevive's server learns of a client's features where there is no batch norm."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase  # pyright: ignore[reportPrivateUsage]

from fednorm.core.state import is_norm, register_tracker
from fednorm.core.surgery import SurgeryReport
from fednorm.errors import ConfigError
from fednorm.layers.sample_norms import PixelLayerNorm
from fednorm.layers.swapping import SwapNorm, substitute


class StatTracker(nn.Module):
    """The identity; in training its buffers move towards mean and biased variance of each channel.

    No gradient flows into the statistics, and no output depends on them (Askin et al. 2025, arXiv 2511.00655).
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, num_features: int, momentum: float = 0.1, axis: int = 1) -> None:
        super().__init__()
        self.num_features = num_features
        self.momentum = momentum
        self.axis = axis
        """where the channels are: 1 in maps and vectors, from the end in sequences"""
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            mean, var = self.moments(input.detach())
            self.running_mean.add_(self.momentum * (mean - self.running_mean))
            self.running_var.add_(self.momentum * (var - self.running_var))
        return input

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and biased variance of each channel of x."""
        axes = [axis for axis in range(x.dim()) if axis != self.axis % x.dim()]
        return x.mean(axes), x.var(axes, correction=0)

    def extra_repr(self) -> str:
        return f"{self.num_features}, momentum={self.momentum}, axis={self.axis}"


register_tracker(StatTracker, running_mean="statistic", running_var="statistic")


class Tracked(nn.Sequential):
    """A layer and what watches its output."""

    def __init__(self, layer: nn.Module, tracker: StatTracker) -> None:
        super().__init__(OrderedDict(layer=layer, tracker=tracker))


@dataclass(frozen=True)
class _InPlaceOfNorms(SwapNorm):
    keep_statistics = False
    momentum: float = 0.1

    def make(self, name: str, old: _BatchNorm) -> nn.Module:
        return StatTracker(old.num_features, self.momentum)

    def label(self, new: nn.Module) -> str:
        return "StatTracker"


@dataclass(frozen=True)
class Track:
    """Trackers in the place of BatchNorms and behind all other norms.

    A network that has neither is watched behind its convolutions, where ResNets have their norms, or without these
    behind its linear layers; the last of them, which makes the outputs, is left out.
    """

    momentum: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.momentum <= 1:
            raise ConfigError(f"trackers with momentum={self.momentum} cannot work; give more than 0, up to 1")

    def __call__(self, model: nn.Module) -> tuple[nn.Module, SurgeryReport]:
        watched, like = _watched(model), next(model.parameters(), torch.empty(()))
        model, swapped = _InPlaceOfNorms(self.momentum)(model)

        def make(name: str, module: nn.Module) -> nn.Module:
            features, axis = _channels(name, module)
            tracker = StatTracker(features, self.momentum, axis)
            return Tracked(module, tracker.to(like.device, like.dtype)).train(module.training)

        model, pairs = substitute(model, watched.__contains__, make)
        behind = (f"{len(pairs)} layers have a StatTracker behind them",) if pairs else ()
        return model, SurgeryReport(swapped.changed + len(pairs), (*swapped.notes, *behind), "layer to watch")


def _watched(model: nn.Module) -> set[nn.Module]:
    """The layers that get a tracker behind them."""
    modules = list(model.modules())
    norms = [module for module in modules if is_norm(module)]
    if norms:
        return {module for module in norms if not isinstance(module, _BatchNorm)}
    convs = [module for module in modules if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    linears = [module for module in modules if isinstance(module, nn.Linear)]
    return set(convs[: len(convs) if linears else -1] or linears[:-1])


def _channels(name: str, module: nn.Module) -> tuple[int, int]:
    """How many channels a layer puts out, and on which axis."""
    if isinstance(module, nn.GroupNorm):
        return module.num_channels, 1
    if isinstance(module, _NormBase):
        return module.num_features, 1
    if isinstance(module, PixelLayerNorm):
        return module.normalized_shape[0], 1
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return module.normalized_shape[0], -len(module.normalized_shape)
    if isinstance(module, nn.Linear):
        return module.out_features, -1
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return cast(nn.Conv2d, module).out_channels, 1
    raise ConfigError(
        f"layer '{name}' ({type(module).__name__}) cannot be tracked: how many channels it puts out is not known; "
        "use FedRevive's statistics=bn or statistics=none with it"
    )
