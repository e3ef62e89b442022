"""ResNets from one trunk, with torchvision's key layout (conv1, bn1, layer1.0.conv1, ..., fc)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fednorm.models.blocks import BasicBlock, Bottleneck, conv, kaiming_normal, projection, zero_pad
from fednorm.models.calling import check_choice
from fednorm.models.registry import register_model

Shortcut = Callable[[int, int, int], nn.Module]


class ResNetTrunk(nn.Module):
    """Stem and stages of a ResNet; `stage_maps` gives the feature map after each stage."""

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        *,
        stem: nn.Conv2d,
        maxpool: bool,
        widths: Sequence[int],
        depths: Sequence[int],
        shortcut: Shortcut = projection,
        dilate_last: bool = False,
    ) -> None:
        super().__init__()
        self.conv1 = stem
        self.bn1 = nn.BatchNorm2d(stem.out_channels)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if maxpool else nn.Identity()
        channels = stem.out_channels
        self._stages: list[str] = []
        for number, (width, depth) in enumerate(zip(widths, depths, strict=True), start=1):
            last_dilated = dilate_last and number == len(widths)
            layers: list[nn.Module] = []
            for index in range(depth):
                # A dilated stage trades its stride for holes, which its first block, fed by the stage before, has not.
                stride = 2 if index == 0 and number > 1 and not last_dilated else 1
                dilation = 2 if last_dilated and index > 0 else 1
                outputs = width * block.expansion
                layers.append(block(channels, width, stride, dilation, shortcut(channels, outputs, stride)))
                channels = outputs
            self._stages.append(f"layer{number}")
            self.add_module(self._stages[-1], nn.Sequential(*layers))
        self.out_channels = channels

    def stage_maps(self, x: Tensor) -> list[Tensor]:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        maps: list[Tensor] = []
        for stage in self._stages:
            x = self.get_submodule(stage)(x)
            maps.append(x)
        return maps


class ResNet(ResNetTrunk):
    """A trunk, the mean over its last map, and a linear layer."""

    def __init__(self, block: type[BasicBlock] | type[Bottleneck], num_classes: int, **trunk: Any) -> None:
        super().__init__(block, **trunk)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(self.out_channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.avgpool(self.stage_maps(x)[-1]), 1))


@register_model(
    "small_resnet",
    summary="three residual blocks of 8, 16 and 32 channels behind a stride-2 stem: seconds on a CPU",
    paper="this project's demo",
    image_size=28,
)
def small_resnet(num_classes: int, in_channels: int) -> nn.Module:
    stem = conv(in_channels, 8, 3, stride=2)
    net = ResNet(BasicBlock, num_classes, stem=stem, maxpool=False, widths=(8, 16, 32), depths=(1, 1, 1))
    return kaiming_normal(net, "fan_in")


@register_model(
    "resnet20",
    summary="ResNet20 for 32x32 images; shortcut A (zero padding, 0.27M parameters) or B (projection)",
    paper="He et al. 2016, Deep Residual Learning for Image Recognition, section 4.2 (arXiv 1512.03385)",
)
def resnet20(num_classes: int, in_channels: int, shortcut: str = "A") -> nn.Module:
    check_choice("shortcut", shortcut, ("A", "B"))
    net = ResNet(
        BasicBlock,
        num_classes,
        stem=conv(in_channels, 16, 3),
        maxpool=False,
        widths=(16, 32, 64),
        depths=(3, 3, 3),
        shortcut=zero_pad if shortcut == "A" else projection,
    )
    return kaiming_normal(net, "fan_in")


@register_model(
    "resnet18",
    summary="ResNet18 with torchvision's keys; stem cifar (3x3, stride 1, no pooling) or imagenet (7x7, pooled)",
    paper="He et al. 2016, Deep Residual Learning for Image Recognition (arXiv 1512.03385)",
)
def resnet18(num_classes: int, in_channels: int, stem: str = "cifar") -> nn.Module:
    check_choice("stem", stem, ("cifar", "imagenet"))
    imagenet = stem == "imagenet"
    net = ResNet(
        BasicBlock,
        num_classes,
        stem=imagenet_stem(in_channels) if imagenet else conv(in_channels, 64, 3),
        maxpool=imagenet,
        widths=(64, 128, 256, 512),
        depths=(2, 2, 2, 2),
    )
    return kaiming_normal(net, "fan_out")


def imagenet_stem(in_channels: int) -> nn.Conv2d:
    return conv(in_channels, 64, 7, stride=2)
