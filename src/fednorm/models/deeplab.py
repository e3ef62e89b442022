"""DeepLabv3+ at output stride 16: a backbone, pooling at several rates, and a decoder on early features."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednorm.models.blocks import BasicBlock, Bottleneck, conv, kaiming_normal
from fednorm.models.calling import check_choice
from fednorm.models.mobilenet import mobilenet_features
from fednorm.models.registry import register_model
from fednorm.models.resnet import ResNetTrunk, imagenet_stem

_RATES = (6, 12, 18)
_WIDTH = 256
_LOW_WIDTH = 48


def conv_norm_relu(in_channels: int, out_channels: int, kernel: int, dilation: int = 1) -> nn.Sequential:
    layer = conv(in_channels, out_channels, kernel, dilation=dilation)
    return nn.Sequential(layer, nn.BatchNorm2d(out_channels), nn.ReLU())


def resize(x: Tensor, like: Tensor) -> Tensor:
    return F.interpolate(x, size=like.shape[-2:], mode="bilinear", align_corners=False)


class MobileNetBackbone(nn.Module):
    """MobileNetV2 without its last convolution: the map at a quarter of the resolution, and the map at a sixteenth."""

    channels = (24, 320)

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        layers = kaiming_normal(nn.Sequential(*mobilenet_features(in_channels, dilate_from=5)), "fan_out")
        self.low_level_features = layers[:4]
        self.high_level_features = layers[4:]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        low = self.low_level_features(x)
        return low, self.high_level_features(low)


class ResNetBackbone(ResNetTrunk):
    """A ResNet with a dilated last stage: the maps after its first and its last stage."""

    def __init__(
        self, in_channels: int, block: type[BasicBlock] | type[Bottleneck], depths: tuple[int, int, int, int]
    ) -> None:
        stem, widths = imagenet_stem(in_channels), (64, 128, 256, 512)
        super().__init__(block, stem=stem, maxpool=True, widths=widths, depths=depths, dilate_last=True)
        self.channels = (widths[0] * block.expansion, widths[-1] * block.expansion)
        kaiming_normal(self, "fan_out")

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        maps = self.stage_maps(x)
        return maps[0], maps[-1]


class PyramidPooling(nn.Module):
    """ASPP: the same map through a 1x1, three dilated 3x3 convolutions and its global mean, concatenated."""

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        dilated = [conv_norm_relu(in_channels, _WIDTH, 3, rate) for rate in _RATES]
        self.convs = nn.ModuleList([conv_norm_relu(in_channels, _WIDTH, 1), *dilated])
        self.mean = nn.Sequential(nn.AdaptiveAvgPool2d(1), *conv_norm_relu(in_channels, _WIDTH, 1))
        branches = len(self.convs) + 1
        self.project = nn.Sequential(*conv_norm_relu(branches * _WIDTH, _WIDTH, 1), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        branches = [branch(x) for branch in self.convs]
        return self.project(torch.cat([*branches, resize(self.mean(x), x)], dim=1))


class DeepLabV3Plus(nn.Module):
    """Class scores for every pixel, at the size of the input."""

    def __init__(self, backbone: MobileNetBackbone | ResNetBackbone, num_classes: int) -> None:
        super().__init__()
        low_channels, high_channels = backbone.channels
        self.backbone = backbone
        self.aspp = kaiming_normal(PyramidPooling(high_channels), "fan_in")
        self.project = kaiming_normal(conv_norm_relu(low_channels, _LOW_WIDTH, 1), "fan_in")
        decoder = nn.Sequential(*conv_norm_relu(_LOW_WIDTH + _WIDTH, _WIDTH, 3), nn.Conv2d(_WIDTH, num_classes, 1))
        self.classifier = kaiming_normal(decoder, "fan_in")

    def forward(self, x: Tensor) -> Tensor:
        low, high = self.backbone(x)
        fused = torch.cat([self.project(low), resize(self.aspp(high), low)], dim=1)
        return resize(self.classifier(fused), x)


def _resnet18(in_channels: int) -> ResNetBackbone:
    return ResNetBackbone(in_channels, BasicBlock, (2, 2, 2, 2))


def _resnet50(in_channels: int) -> ResNetBackbone:
    return ResNetBackbone(in_channels, Bottleneck, (3, 4, 6, 3))


_BACKBONES: dict[str, Callable[[int], MobileNetBackbone | ResNetBackbone]] = {
    "mobilenet_v2": MobileNetBackbone,
    "resnet18": _resnet18,
    "resnet50": _resnet50,
}


@register_model(
    "deeplabv3plus",
    summary="DeepLabv3+ at output stride 16; backbone mobilenet_v2, resnet18 or resnet50; one score a class and pixel",
    paper="Chen et al. 2018, Encoder-Decoder with Atrous Separable Convolution (arXiv 1802.02611)",
    task="segmentation",
    image_size=768,
    num_classes=19,
)
def deeplabv3plus(num_classes: int, in_channels: int, backbone: str = "mobilenet_v2") -> nn.Module:
    check_choice("backbone", backbone, _BACKBONES)
    return DeepLabV3Plus(_BACKBONES[backbone](in_channels), num_classes)
