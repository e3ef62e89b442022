"""A multilayer perceptron with BatchNorm1d."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fednorm.models.calling import check_positive
from fednorm.models.cnn import linear_norm_relu
from fednorm.models.registry import register_model


class FlatNet(nn.Module):
    """A stack of layers on the flattened input."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(torch.flatten(x, 1))


@register_model(
    "mlp_bn",
    summary="linear layers with BatchNorm1d on a vector or flattened image; options width and depth of hidden layers",
    paper="this project's own",
    image_size=28,
)
def mlp_bn(num_classes: int, in_channels: int, image_size: int, width: int = 128, depth: int = 2) -> nn.Module:
    check_positive("width", width)
    check_positive("depth", depth)
    inputs = [in_channels * image_size**2] + [width] * (depth - 1)
    hidden = [layer for size in inputs for layer in linear_norm_relu(size, width)]
    return FlatNet(*hidden, nn.Linear(width, num_classes))
