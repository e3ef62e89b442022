"""Residual blocks of the ResNets, findable by their type, and the parts they are made of."""

from __future__ import annotations

from typing import Literal, TypeVar

from torch import Tensor, nn

from fednorm.layers.residual import ResidualBlock, ZeroPadShortcut

M = TypeVar("M", bound=nn.Module)


class BasicBlock(ResidualBlock):
    """Two 3x3 convolutions (He et al. 2016, figure 5 left)."""

    def __init__(self, in_channels: int, width: int, stride: int, dilation: int, shortcut: nn.Module) -> None:
        super().__init__()
        self.conv1 = conv(in_channels, width, 3, stride=stride, dilation=dilation)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.conv2 = conv(width, width, 3, dilation=dilation)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = shortcut

    def main(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        return self.bn2(self.conv2(x))


class Bottleneck(ResidualBlock):
    """1x1, 3x3, 1x1 convolutions, the stride on the 3x3 as in torchvision (He et al. 2016, figure 5 right)."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int, dilation: int, shortcut: nn.Module) -> None:
        super().__init__()
        self.conv1 = conv(in_channels, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width, 3, stride=stride, dilation=dilation)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = conv(width, width * self.expansion, 1)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU()
        self.downsample = shortcut

    def main(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        return self.bn3(self.conv3(x))


def projection(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """Option B of He et al. 2016: a 1x1 convolution and a norm where the shape changes, else nothing."""
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(conv(in_channels, out_channels, 1, stride=stride), nn.BatchNorm2d(out_channels))


def zero_pad(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """Option A of He et al. 2016 where the shape changes, with zero channels on both sides, else nothing."""
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    before = (out_channels - in_channels) // 2
    return ZeroPadShortcut(stride, before, out_channels - in_channels - before)


def conv(
    in_channels: int, out_channels: int, kernel: int, *, stride: int = 1, dilation: int = 1, groups: int = 1
) -> nn.Conv2d:
    """A convolution without bias (a norm follows) that keeps the map's size at stride 1; the kernel is odd."""
    padding = dilation * (kernel // 2)
    return nn.Conv2d(in_channels, out_channels, kernel, stride, padding, dilation=dilation, groups=groups, bias=False)


def kaiming_normal(model: M, mode: Literal["fan_in", "fan_out"]) -> M:
    """Draw every convolution of the model from N(0, 2 / fan), and return the model (He et al. 2015)."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode=mode, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model
