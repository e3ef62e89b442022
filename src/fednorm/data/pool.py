"""Training examples, and which rows of them are whose: everybody's in a simulator, one client's at a site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fednorm.data.live import LiveRows


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Inputs, labels, and the rows of every client by its id.

    Images stay uint8 (N, C, H, W) until a batch is drawn; `mean` and `std` then turn them into floats. Float inputs
    pass through.
    """

    x: Tensor
    y: Tensor
    rows: Sequence[Tensor] | Mapping[int, Tensor]
    clients: Sequence[int]
    """ids of the clients that train, ascending"""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    ignore_index: int = -100
    live: LiveRows | None = None
    """where examples are read when they are needed; `x` and `y` then show what they look like"""

    @property
    def examples(self) -> tuple[Tensor, Tensor] | LiveRows:
        """All of them, as a scorer takes them."""
        return self.live or (self.x, self.y)

    def inputs(self, raw: Tensor) -> Tensor:
        """Raw rows as the model wants them."""
        return scaled(raw, self.mean, self.std)


def own_pool(
    client: int, x: Tensor, y: Tensor, *, mean: tuple[float, ...] = (), std: tuple[float, ...] = (), ignore: int = -100
) -> Pool:
    """The pool of one client that has nobody else's data.

    >>> own_pool(3, torch.zeros(2, 1), torch.zeros(2)).rows[3]
    tensor([0, 1])
    """
    return Pool(
        x=x, y=y, rows={client: torch.arange(len(y))}, clients=(client,), mean=mean, std=std, ignore_index=ignore
    )


def scaled(raw: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Bytes of images as floats of about mean 0 and deviation 1; what is no byte stays as it is."""
    if raw.dtype != torch.uint8:
        return raw
    x = raw.to(torch.float32) / 255
    if not mean:
        return x
    shape = (-1, 1, 1)
    centre, spread = (_on_device(values, x.device).view(shape) for values in (mean, std))
    return (x - centre) / spread


@lru_cache(maxsize=16)
def _on_device(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device)  # once: a copy from the host in every batch would stall a GPU
