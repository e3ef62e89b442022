"""Model surgery that puts torch's own layers in the place of BatchNorm, and keyed dropout in the place of dropout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]

from fednorm.core.surgery import SurgeryReport
from fednorm.errors import ConfigError
from fednorm.layers.keyed import KeyedDropout, number_keyed_layers
from fednorm.layers.sample_norms import InstanceNorm, PixelLayerNorm
from fednorm.layers.swapping import SwapNorm, largest_divisor, substitute


@dataclass(frozen=True)
class ToGroupNorm(SwapNorm):
    """BatchNorm becomes GroupNorm; a channel count that `groups` does not divide gets its largest divisor below.

    >>> model = nn.Sequential(nn.BatchNorm2d(8), nn.BatchNorm2d(9))
    >>> ToGroupNorm(4)(model)[1].notes[0]
    '2 BatchNorm layers became GroupNorm(4) x1, GroupNorm(3) x1: affine kept, running statistics dropped'
    """

    groups: int = 2

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise ConfigError(
                f"group norm with {self.groups} groups cannot work; give a number of groups of at least 1"
            )

    def make(self, name: str, old: _BatchNorm) -> nn.Module:
        return nn.GroupNorm(largest_divisor(old.num_features, self.groups), old.num_features, affine=old.affine)

    def label(self, new: nn.Module) -> str:
        return f"GroupNorm({cast(nn.GroupNorm, new).num_groups})"


@dataclass(frozen=True)
class ToLayerNorm(SwapNorm):
    """BatchNorm becomes LayerNorm over (C, H, W), or over C on vectors, with the affine per channel.

    GroupNorm with one group is both: on (N, C) its statistics run over C alone.
    """

    def make(self, name: str, old: _BatchNorm) -> nn.Module:
        return nn.GroupNorm(1, old.num_features, affine=old.affine)

    def label(self, new: nn.Module) -> str:
        return "LayerNorm"


@dataclass(frozen=True)
class ToPixelLayerNorm(SwapNorm):
    """BatchNorm becomes LayerNorm over the channels of each pixel, as in ConvNeXt."""

    def make(self, name: str, old: _BatchNorm) -> nn.Module:
        return PixelLayerNorm(old.num_features, elementwise_affine=old.affine)

    def label(self, new: nn.Module) -> str:
        return "LayerNorm per pixel"


@dataclass(frozen=True)
class ToInstanceNorm(SwapNorm):
    """BatchNorm becomes InstanceNorm without running statistics; vectors get LayerNorm.

    Without `affine` there is neither scale nor shift, as in torch's own by default.
    """

    affine: bool = True

    def make(self, name: str, old: _BatchNorm) -> nn.Module:
        return InstanceNorm(old.num_features, old.affine and self.affine, name)

    def label(self, new: nn.Module) -> str:
        return "InstanceNorm"


_DROPOUTS: dict[type[_DropoutNd], int] = {nn.Dropout: 0, nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}


def _dropout_axes(module: nn.Module) -> int | None:
    for cls, spatial in _DROPOUTS.items():
        if isinstance(module, cls) and type(module).forward is cls.forward:
            return spatial
    return None


@dataclass(frozen=True)
class KeyDropout:
    """Dropout and its channel-wise kin draw keyed masks; what draws in functions is keyed as they run."""

    def __call__(self, model: nn.Module) -> tuple[nn.Module, SurgeryReport]:
        def make(name: str, module: nn.Module) -> nn.Module:
            old = cast(_DropoutNd, module)
            return KeyedDropout(old.p, _dropout_axes(old) or 0).train(old.training)

        model, pairs = substitute(model, lambda module: _dropout_axes(module) is not None, make)
        number_keyed_layers(model)
        return model, SurgeryReport(len(pairs), (f"{len(pairs)} dropout layers draw keyed masks",) if pairs else ())
