"""The workload that every peer plays: ten clients of a small BN network on random images, E steps of batch 20.

The same as `fednorm.bench.cpu_rounds`, without fednorm, which a peer's environment does not have.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib import metadata

CLIENTS, BATCH, EXAMPLES, LR = 10, 20, 200, 0.02


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1, help="local steps of a round")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cores", type=int, default=2)
    return parser.parse_args()


class Clock:
    """Seconds of each round, from the moments at which rounds end."""

    def __init__(self) -> None:
        self.moments = [time.perf_counter()]

    def tick(self) -> None:
        self.moments.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        return [after - before for before, after in zip(self.moments, self.moments[1:], strict=False)]


def tell(peer: str, package: str, how: str, clock: Clock) -> None:
    """The one line that `fednorm bench` reads; the first round also starts up, and is told as it is."""
    version = metadata.version(package)
    print(json.dumps({"peer": peer, "version": version, "how": how, "seconds": clock.seconds}), flush=True)


def network():  # type: ignore[no-untyped-def]
    """25,674 parameters."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(2048, 10)),
    )


def images(count: int):  # type: ignore[no-untyped-def]
    """Random images and labels as tensors."""
    import torch

    draw = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, 32, 32, generator=draw), torch.randint(0, 10, (count,), generator=draw)
