"""Small runs in NVFlare's simulator, and what their sites need to be told apart."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fednorm.running.config import RunConfig, all_fields, updated

HERE = Path(__file__).parent
LIMIT = 1000
"""Seconds after which a process has hung that takes one minute at most where nobody else is at work."""
TINY = {
    "model": "fedbs_mnist_cnn",
    "rounds": 3,
    "data.clients": 2,
    "data.train_limit": 60,
    "train.local_steps": 2,
    "train.batch_size": 8,
    "eval.every": 3,
}
PIDS = "FEDNORM_TEST_PIDS"
"""environment variable: a folder in which sites note the processes that they ran in"""


def tiny(**fields: Any) -> RunConfig:
    """A run of seconds; `data_clients=4` is the field `data.clients`."""
    known = all_fields()
    named = {name if name in known else name.replace("_", ".", 1): value for name, value in fields.items()}
    return updated(RunConfig(), {**TINY, **named})


class Net(nn.Module):
    """A model of the user's own, that a job names by its path."""

    def __init__(self, num_classes: int, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, num_classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def own_data(site: str) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Data of the user's own: other numbers at every site. Notes in which process they were asked for."""
    if PIDS in os.environ:
        with open(Path(os.environ[PIDS]) / site, "a") as file:
            file.write(f"{os.getpid()}\n")
    random = torch.Generator().manual_seed(sum(map(ord, site)))
    x = torch.randn(24, 6, generator=random)
    y = (x.sum(1) > 0).long()
    return (x[:16], y[:16]), (x[16:], y[16:])


def own_files(folder: Path, sites: int = 2) -> Path:
    """A file with a few small images of every site, some of them for tests."""
    path = folder / "data.npz"
    if not path.exists():
        draw = np.random.default_rng(0)
        sizes = [40 + 8 * site for site in range(sites)]
        names = np.repeat([f"site-{site + 1}" for site in range(sites)], sizes)
        shift = np.repeat(np.arange(sites), sizes)[:, None, None, None]
        x = draw.normal(size=(sum(sizes), 1, 4, 4)).astype(np.float32) + shift.astype(np.float32)
        split = np.where(np.arange(sum(sizes)) % 4, "train", "test")
        np.savez(path, x=x, y=draw.integers(0, 3, sum(sizes)), client=names, split=split)
    return path
