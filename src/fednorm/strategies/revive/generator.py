"""The network that makes images out of noise and a class, for the server that has no data."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fednorm.core.state import Tree


class Generator(nn.Module):
    """Noise to images in [0, 1]: a linear layer to a quarter of their side, then twice as large two times.

    Its batch norms use the batch they are given, and remember nothing: images are made in batches alone.
    """

    def __init__(self, latent: int, width: int, shape: tuple[int, int, int]) -> None:
        super().__init__()
        channels, self.height, self.width = shape
        self.first = (2 * width, -(-self.height // 4), -(-self.width // 4))
        self.linear = nn.Linear(latent, self.first[0] * self.first[1] * self.first[2])
        self.body = nn.Sequential(
            _norm(2 * width),
            nn.Upsample(scale_factor=2),
            *(_conv(2 * width, 2 * width), _norm(2 * width), nn.LeakyReLU(0.2)),
            nn.Upsample(scale_factor=2),
            *(_conv(2 * width, width), _norm(width), nn.LeakyReLU(0.2)),
            *(_conv(width, channels), nn.Sigmoid()),
        )

    def forward(self, noise: Tensor) -> Tensor:
        images = self.body(self.linear(noise).view(-1, *self.first))
        return images[:, :, : self.height, : self.width]  # sides that 4 does not divide were rounded up


def _conv(inputs: int, outputs: int) -> nn.Module:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def _norm(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels, track_running_stats=False)


def bare_generator(latent: int, width: int, shape: tuple[int, int, int]) -> Generator:
    """A generator without numbers of its own: `images_of` gives it some."""
    with torch.device("meta"):
        return Generator(latent, width, shape)


def first_parameters(latent: int, width: int, shape: tuple[int, int, int], seed: int) -> Tree:
    """What a generator begins with, a function of the seed."""
    with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
        torch.default_generator.manual_seed(seed)
        network = Generator(latent, width, shape)
    return {key: value.detach().clone() for key, value in network.named_parameters()}


def images_of(network: nn.Module, parameters: Tree, noise: Tensor) -> Tensor:
    """The images that a generator with these parameters makes."""
    return cast(Tensor, functional_call(network, parameters, (noise,)))
