"""Plain convolutional networks of the federated-learning papers: features, then fully connected layers."""

from __future__ import annotations

from itertools import count

import torch
from torch import Tensor, nn

from fednorm.errors import ConfigError
from fednorm.models.calling import check_choice
from fednorm.models.registry import register_model

_FEDBN = (
    "Li et al. 2021, FedBN: Federated Learning on Non-IID Features via Local Batch Normalization (arXiv 2102.07623)"
)
_FEDBS = "Idrissi et al. 2021, FedBS: Learning on Non-IID Data in Federated Learning using Batch Normalization (ICTAI)"


class ConvNet(nn.Module):
    """A stack of convolutions, flattened, and a stack of linear layers."""

    def __init__(self, features: nn.Sequential, classifier: nn.Sequential) -> None:
        super().__init__()
        self.features = features
        self.classifier = classifier

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.features(x), 1))


def map_side(features: nn.Sequential, image_size: int) -> int:
    """Side of the map that `features` make of a square image, 0 if the image is too small for them.

    >>> map_side(nn.Sequential(nn.Conv2d(3, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)), 28)
    14
    """
    side = image_size
    for layer in features:
        if isinstance(layer, nn.Conv2d):
            side = (side + 2 * int(layer.padding[0]) - layer.kernel_size[0]) // layer.stride[0] + 1
        elif isinstance(layer, (nn.MaxPool2d, nn.AvgPool2d)):
            kernel, stride = int(layer.kernel_size), int(layer.stride)  # pyright: ignore[reportArgumentType]
            # A kernel no smaller than its stride: torch's rule for a last window beyond the edge never applies.
            side = (side - kernel + (stride - 1 if layer.ceil_mode else 0)) // stride + 1
        elif isinstance(layer, nn.AdaptiveAvgPool2d):
            side = int(layer.output_size)  # pyright: ignore[reportArgumentType]
        if side < 1:
            return 0
    return side


def flat_width(name: str, features: nn.Sequential, channels: int, image_size: int) -> int:
    """Inputs of the first linear layer; an image that is too small is refused with the smallest that is not."""
    side = map_side(features, image_size)
    if side < 1:
        smallest = next(size for size in count(image_size) if map_side(features, size) > 0)
        raise ConfigError(f"model '{name}' needs images of at least {smallest} pixels a side; got {image_size}")
    return channels * side**2


def conv_norm_relu(
    in_channels: int, out_channels: int, kernel: int, *, padding: int, stride: int = 1
) -> list[nn.Module]:
    """The papers' usual group; its convolution keeps the bias that the norm makes idle, as their code does."""
    conv = nn.Conv2d(in_channels, out_channels, kernel, stride, padding)
    return [conv, nn.BatchNorm2d(out_channels), nn.ReLU()]


def linear_norm_relu(inputs: int, outputs: int) -> list[nn.Module]:
    """A hidden layer of a network with BatchNorm1d."""
    return [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU()]


@register_model(
    "lenet_cnn",
    summary="three 5x5 convolutions and one linear layer; norm batch (no conv bias) or none (conv bias)",
    paper="Hsieh et al. 2020, The Non-IID Data Quagmire of Decentralized Machine Learning (arXiv 1910.00189)",
)
def lenet_cnn(num_classes: int, in_channels: int, image_size: int, norm: str = "batch") -> nn.Module:
    check_choice("norm", norm, ("batch", "none"))

    def conv(inputs: int, outputs: int) -> nn.Module:
        return nn.Conv2d(inputs, outputs, 5, padding=2, bias=norm == "none")

    def bn(channels: int) -> nn.Module:
        return nn.BatchNorm2d(channels) if norm == "batch" else nn.Identity()

    def average() -> nn.Module:
        return nn.AvgPool2d(3, 2, ceil_mode=True)

    # Pooling rounds up, as in caffe, whose network this is: 32, 16, 8, 4.
    features = nn.Sequential(
        *(conv(in_channels, 32), nn.MaxPool2d(3, 2, ceil_mode=True), bn(32), nn.ReLU()),
        *(conv(32, 32), bn(32), nn.ReLU(), average()),
        *(conv(32, 64), bn(64), nn.ReLU(), average()),
    )
    width = flat_width("lenet_cnn", features, 64, image_size)
    return ConvNet(features, nn.Sequential(nn.Linear(width, num_classes)))


@register_model(
    "digit_cnn",
    summary="three 5x5 convolutions and three linear layers, a norm after each but the last",
    paper=_FEDBN,
    image_size=28,
)
def digit_cnn(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    features = nn.Sequential(
        *(*conv_norm_relu(in_channels, 64, 5, padding=2), nn.MaxPool2d(2)),
        *(*conv_norm_relu(64, 64, 5, padding=2), nn.MaxPool2d(2)),
        *conv_norm_relu(64, 128, 5, padding=2),
    )
    width = flat_width("digit_cnn", features, 128, image_size)
    classifier = (*linear_norm_relu(width, 2048), *linear_norm_relu(2048, 512), nn.Linear(512, num_classes))
    return ConvNet(features, nn.Sequential(*classifier))


@register_model(
    "alexnet_bn",
    summary="AlexNet with a norm after every layer but the last, and no dropout",
    paper=_FEDBN,
    image_size=256,
)
def alexnet_bn(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    features = nn.Sequential(
        *(*conv_norm_relu(in_channels, 64, 11, stride=4, padding=2), nn.MaxPool2d(3, 2)),
        *(*conv_norm_relu(64, 192, 5, padding=2), nn.MaxPool2d(3, 2)),
        *conv_norm_relu(192, 384, 3, padding=1),
        *conv_norm_relu(384, 256, 3, padding=1),
        *(*conv_norm_relu(256, 256, 3, padding=1), nn.MaxPool2d(3, 2)),
        nn.AdaptiveAvgPool2d(6),
    )
    width = flat_width("alexnet_bn", features, 256, image_size)
    classifier = (*linear_norm_relu(width, 4096), *linear_norm_relu(4096, 4096), nn.Linear(4096, num_classes))
    return ConvNet(features, nn.Sequential(*classifier))


@register_model(
    "fedbs_cifar_cnn",
    summary="four convolutions of 100 to 500 channels, each normed and pooled, and three linear layers",
    paper=_FEDBS,
)
def fedbs_cifar_cnn(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    # The paper's 4500 inputs of the first linear layer are 500 x 3 x 3, which only padding 2 on every layer gives.
    features = nn.Sequential(
        *(*conv_norm_relu(in_channels, 100, 5, padding=2), nn.MaxPool2d(2)),
        *(*conv_norm_relu(100, 150, 3, padding=2), nn.MaxPool2d(2)),
        *(*conv_norm_relu(150, 250, 3, padding=2), nn.MaxPool2d(2)),
        *(*conv_norm_relu(250, 500, 3, padding=2), nn.MaxPool2d(2)),
    )
    width = flat_width("fedbs_cifar_cnn", features, 500, image_size)
    classifier = (nn.Linear(width, 270), nn.ReLU(), nn.Linear(270, 150), nn.ReLU(), nn.Linear(150, num_classes))
    return ConvNet(features, nn.Sequential(*classifier))


@register_model(
    "fedbs_mnist_cnn",
    summary="two 5x5 convolutions, each normed and pooled, and one linear layer",
    paper=_FEDBS,
    image_size=28,
)
def fedbs_mnist_cnn(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    features = nn.Sequential(
        *(*conv_norm_relu(in_channels, 16, 5, padding=2), nn.MaxPool2d(2)),
        *(*conv_norm_relu(16, 32, 5, padding=2), nn.MaxPool2d(2)),
    )
    width = flat_width("fedbs_mnist_cnn", features, 32, image_size)
    return ConvNet(features, nn.Sequential(nn.Linear(width, num_classes)))


@register_model(
    "simple_cnn",
    summary="two unpadded 3x3 convolutions and two linear layers with dropout, no norm",
    paper="Granqvist et al. 2024, pfl-research: simulation framework for private federated learning (arXiv 2404.06430)",
)
def simple_cnn(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    features = nn.Sequential(
        *(nn.Conv2d(in_channels, 32, 3), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Dropout(0.25),
    )
    width = flat_width("simple_cnn", features, 64, image_size)
    classifier = nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, num_classes))
    model = ConvNet(features, classifier)
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)) and module.bias is not None:
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    return model
