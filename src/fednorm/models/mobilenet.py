"""MobileNetV2 with torchvision's key layout (features.0.0, features.1.conv.0.0, ..., classifier.1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fednorm.errors import ConfigError
from fednorm.models.blocks import conv, kaiming_normal
from fednorm.models.calling import check_choice
from fednorm.models.registry import register_model

# Table 2 of the paper: expansion, channels, repeats, stride of the first.
_STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
_LAST_CHANNELS = 1280


def conv_norm_relu6(
    in_channels: int, out_channels: int, kernel: int, *, stride: int = 1, dilation: int = 1, groups: int = 1
) -> nn.Sequential:
    layer = conv(in_channels, out_channels, kernel, stride=stride, dilation=dilation, groups=groups)
    return nn.Sequential(layer, nn.BatchNorm2d(out_channels), nn.ReLU6())


class InvertedResidual(nn.Module):
    """Widen by 1x1, filter each channel, narrow by 1x1 without activation; add the input where the shape allows."""

    def __init__(self, in_channels: int, out_channels: int, expansion: int, stride: int, dilation: int) -> None:
        super().__init__()
        self.adds_input = stride == 1 and in_channels == out_channels
        wide = in_channels * expansion
        widen = [conv_norm_relu6(in_channels, wide, 1)] if expansion != 1 else []
        self.conv = nn.Sequential(
            *widen,
            conv_norm_relu6(wide, wide, 3, stride=stride, dilation=dilation, groups=wide),
            conv(wide, out_channels, 1),
            nn.BatchNorm2d(out_channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.adds_input else self.conv(x)


def mobilenet_features(
    in_channels: int, *, keep_resolution: bool = False, dilate_from: int | None = None
) -> list[nn.Module]:
    """Stem and the 17 inverted residual blocks.

    `keep_resolution` drops the strides of the stem and of the first strided stage, for small images. From stage
    `dilate_from` on, strides become dilation, and the map keeps the size it has there.
    """
    layers: list[nn.Module] = [conv_norm_relu6(in_channels, 32, 3, stride=1 if keep_resolution else 2)]
    channels, dilation = 32, 1
    for number, (expansion, width, repeats, first_stride) in enumerate(_STAGES):
        for index in range(repeats):
            stride = first_stride if index == 0 and not (keep_resolution and number == 1) else 1
            before = dilation
            if dilate_from is not None and number >= dilate_from:
                # The first block of a dilated stage still sees the undilated map, as in torchvision's ResNets.
                stride, dilation = 1, dilation * stride
            layers.append(InvertedResidual(channels, width, expansion, stride, before))
            channels = width
    return layers


class MobileNetV2(nn.Module):
    """The features, the mean over the last map, dropout and a linear layer."""

    def __init__(self, num_classes: int, in_channels: int, *, keep_resolution: bool, dropout: float) -> None:
        super().__init__()
        last = conv_norm_relu6(_STAGES[-1][1], _LAST_CHANNELS, 1)
        self.features = nn.Sequential(*mobilenet_features(in_channels, keep_resolution=keep_resolution), last)
        head = nn.Linear(_LAST_CHANNELS, num_classes)
        nn.init.normal_(head.weight, 0, 0.01)
        nn.init.zeros_(head.bias)
        self.classifier = nn.Sequential(nn.Dropout(dropout), head)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.mean(self.features(x), (2, 3)))


@register_model(
    "mobilenet_v2",
    summary="MobileNetV2 with torchvision's keys; stem cifar (stride 1 in stem and second stage) or imagenet",
    paper="Sandler et al. 2018, MobileNetV2: Inverted Residuals and Linear Bottlenecks (arXiv 1801.04381)",
)
def mobilenet_v2(num_classes: int, in_channels: int, stem: str = "cifar", dropout: float = 0.2) -> nn.Module:
    check_choice("stem", stem, ("cifar", "imagenet"))
    if not 0 <= dropout < 1:
        raise ConfigError(f"model 'mobilenet_v2': dropout must be at least 0 and below 1; got {dropout}")
    model = MobileNetV2(num_classes, in_channels, keep_resolution=stem == "cifar", dropout=dropout)
    return kaiming_normal(model, "fan_out")
