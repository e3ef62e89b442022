"""Data sets as users write them, in a module of their own, so that other processes can have them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

import tiny


class Plain(Dataset[Any]):
    """Items that are equal in every read."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y
        self.reads = 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.reads += 1
        return self.x[index], int(self.y[index])


class Noisy(Plain):
    """Items with noise from each of the three generators that transforms use."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        x, y = super().__getitem__(index)
        noise = random.gauss(0, 1) + np.random.rand() + torch.rand(x.shape, dtype=x.dtype)
        return x + 0.1 * noise, y


class Broken(Plain):
    """An item that cannot be read."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if index == 5:
            raise OSError(f"no such file: image_{index}.png\nand more")
        return super().__getitem__(index)


class Stateful(Plain):
    """Items that depend on how many were read before, which no seed can repeat."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        x, y = super().__getitem__(index)
        return x + self.reads, y


def clients(kind: type[Plain], sizes: tuple[int, ...] = (8, 12, 9)) -> list[Plain]:
    """The clients of the tiny federation as data sets."""
    return [kind(*tiny.examples(size, shift=c - 1.0, seed=c + 1)) for c, size in enumerate(sizes)]


def held_out(kind: type[Plain], count: int = 3) -> list[Plain]:
    return [kind(*tiny.examples(6, shift=c - 1.0, seed=c + 101)) for c in range(count)]
