"""Data to be fast on: random images, since speed does not depend on what they show, or CIFAR-10 where it is at hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from fednorm.data import load_dataset
from fednorm.data.client_rows import consecutive_rows
from fednorm.data.federation import Federation
from fednorm.errors import ConfigError

CIFAR_TRAIN, CIFAR_TEST = 50_000, 10_000


def random_images(
    clients: int,
    size: int,
    tests: int = 10,
    shape: tuple[int, int, int] = (3, 32, 32),
    labels: tuple[int, ...] = (),
) -> Federation:
    """Clients with this many random images each, of CIFAR's size if no other is given, and labels of a shape."""
    draw = torch.Generator().manual_seed(0)

    def images(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=draw)
        return x, torch.randint(0, 10, (count, *labels), generator=draw)

    made = _dealt("random images", *images(clients * size), *images(tests), clients=clients)
    return replace(made, task="segmentation", ignore_index=255) if labels else made


def cifar10(clients: int, data_dir: str | Path | None) -> Federation:
    """CIFAR-10 dealt out evenly, or as many random images of its size; the name says which."""
    try:
        found = load_dataset("cifar10", data_dir)
    except ConfigError:
        if data_dir is not None:
            raise
        return random_images(clients, CIFAR_TRAIN // clients, CIFAR_TEST)
    mixed = found.keep(torch.randperm(len(found.train_y), generator=torch.Generator().manual_seed(0)))
    return _dealt("cifar10", mixed.train_x, mixed.train_y, mixed.test_x, mixed.test_y, clients=clients)


def _dealt(
    name: str, x: torch.Tensor, y: torch.Tensor, test_x: torch.Tensor, test_y: torch.Tensor, *, clients: int
) -> Federation:
    """Equal shares; no test rows of a client's own, so that the global model alone is scored."""
    size = len(x) // clients
    return Federation(
        name=name,
        x=x[: clients * size],
        y=y[: clients * size].to(torch.int64),
        clients=consecutive_rows([size] * clients),
        test_x=test_x,
        test_y=test_y.to(torch.int64),
        own_test=(torch.arange(0),) * clients,
        num_classes=10,
        mean=(0.4914, 0.4822, 0.4465)[: x.shape[1]],
        std=(0.247, 0.2435, 0.2616)[: x.shape[1]],
    )
