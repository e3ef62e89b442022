"""What users' files hold, before rows are dealt to clients and set aside for tests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from fednorm.data.federation import Federation

TRAIN, TEST, OPEN = 0, 1, 2
"""What a row is for; an open one is drawn for either."""


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """How files are read: which columns of a table mean what, and the size of images."""

    target: str | None = None
    client: str | None = None
    split: str | None = None
    features: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    standardize: Literal["pooled", "client", "none"] = "pooled"
    missing: Literal["refuse", "mean"] = "refuse"
    size: int | None = None
    task: str | None = None


@dataclass(frozen=True, kw_only=True)
class FileSet:
    """Inputs and labels row by row, whose each row is, and which rows are for tests.

    `x` of a table is the number of each row: its columns become numbers in `finish`, once it is known which rows
    train. `client` gives the row's index in `client_names`, and is None where the files name no clients.
    """

    name: str
    x: Tensor
    y: Tensor
    split: Tensor
    num_classes: int
    form: Literal["images", "vectors", "tokens", "arrays"]
    finish: Callable[[Federation], Federation]
    client: Tensor | None = None
    client_names: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    task: str = "classification"
    notes: tuple[str, ...] = ()
    content: Sequence[Tensor | str] = ()
    """what beside the fields above makes these data what they are"""

    @cached_property
    def digest(self) -> str:
        """The same for the same data, wherever they lie."""
        found = hashlib.blake2b(digest_size=16)
        clients = () if self.client is None else (self.client, "\0".join(self.client_names))
        for part in (self.x, self.y, self.split, *clients, "\0".join(self.classes), self.task, *self.content):
            if isinstance(part, str):
                found.update(part.encode(errors="surrogateescape"))
                continue
            found.update(f"{part.dtype} {tuple(part.shape)}".encode())
            if part.numel():
                found.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()
