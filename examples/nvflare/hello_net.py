"""What the examples train: a small network with batch norm, and data whose features differ from site to site."""

import torch
from torch import nn

SCALES = {"site-1": 1.0, "site-2": 4.0}


class Net(nn.Sequential):
    """Two classes of points with eight features."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2))


def points(site: str, count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Points as a site measures them, each site in units of its own."""
    draws = torch.Generator().manual_seed(1000 * seed + int(site[-1]))
    x = torch.randn(count, 8, generator=draws)
    return x * SCALES[site], (x[:, 0] > x[:, 1]).long()


def load(site: str) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """A site's examples to train on and to be tested with, for `Recipe(data="hello_net:load")`."""
    return points(site, 256), points(site, 128, seed=1)
