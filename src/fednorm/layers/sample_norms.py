"""Norms over one sample alone that torch does not offer in the shape we need.

Both keep their tensors as `weight` and `bias` and inherit from torch's layers, so their kinds are already declared.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from fednorm.errors import ConfigError
from fednorm.layers.batch_stats import scale_and_shift


class PixelLayerNorm(nn.LayerNorm):
    """LayerNorm over the channels of each pixel of a channels-first map; on vectors the usual LayerNorm."""

    def forward(self, input: Tensor) -> Tensor:
        # Not layer_norm on a permuted view: its strided output makes vmap fall back to a slow loop in the next pooling.
        mean, var = input.mean(1, keepdim=True), input.var(1, correction=0, keepdim=True)
        return scale_and_shift((input - mean) * (var + self.eps).rsqrt(), self.weight, self.bias)


class InstanceNorm(nn.GroupNorm):
    """Instance norm on maps (one group a channel); vectors have no pixels, so there it is LayerNorm."""

    def __init__(self, channels: int, affine: bool, layer: str) -> None:
        super().__init__(channels, channels, affine=affine)
        self.layer = layer

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() > 2 and input.shape[2:].numel() == 1:
            raise ConfigError(
                f"instance norm '{self.layer}' sees a map of one pixel, where its output is its bias whatever the "
                "input; use group or layer norm, a larger input or fewer strides"
            )
        groups = self.num_groups if input.dim() > 2 else 1
        return functional.group_norm(input, groups, self.weight, self.bias, self.eps)
