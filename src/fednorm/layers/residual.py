"""The types by which surgery finds the residual blocks of a model, and shortcuts without parameters."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """A block relu(main(x) + shortcut(x)); surgery on residual nets finds its places by this type.

    The modules are called as torchvision calls them, `downsample` for the shortcut included, so that checkpoints
    travel. `shortcut` is an `nn.Identity` where input and output have one shape.
    """

    expansion = 1
    conv1: nn.Module
    bn1: nn.Module
    conv2: nn.Module
    bn2: nn.Module
    relu: nn.Module
    downsample: nn.Module

    def main(self, x: Tensor) -> Tensor:
        """The residual branch, up to and including its last norm."""
        raise NotImplementedError

    @property
    def shortcut(self) -> nn.Module:
        return self.downsample

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.main(x) + self.shortcut(x))


class ZeroPadShortcut(nn.Module):
    """Every `stride`-th pixel, with zeros as further channels before and after those of the input; no parameters."""

    def __init__(self, stride: int, before: int, after: int) -> None:
        super().__init__()
        self.stride, self.before, self.after = stride, before, after

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.before, self.after))
