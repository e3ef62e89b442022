"""A federation's data: one pool of examples, and for each client the rows that are its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from fednorm.data.client_rows import MANY, ClientRows, consecutive_rows
from fednorm.data.pool import Pool
from fednorm.errors import ConfigError


def called(client: int, names: Sequence[str] = ()) -> str:
    """A client as texts name it.

    >>> called(1), called(1, ["north", "south"])
    ('client 1', "client 1 ('south')")
    """
    return f"client {client} ('{names[client]}')" if names else f"client {client}"


@dataclass(frozen=True, kw_only=True)
class Federation:
    """Training and test pools with the rows of every client.

    Images stay uint8 (N, C, H, W) until a batch is drawn; `mean` and `std` then turn them into floats. Float inputs
    pass through. `own_test` holds the test rows that look like a client's own data, `domains` the test rows by domain.
    Clients listed in `unseen` never train. `client_names` is empty where clients have numbers only.
    """

    name: str
    x: Tensor
    y: Tensor
    clients: Sequence[Tensor]
    test_x: Tensor
    test_y: Tensor
    own_test: Sequence[Tensor]
    num_classes: int
    domains: Mapping[str, Tensor] = field(default_factory=dict)
    unseen: frozenset[int] = frozenset()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    classes: tuple[str, ...] = ()
    task: str = "classification"
    ignore_index: int = -100
    client_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """what a user should know about how the data were read and prepared"""
    preprocessing: Mapping[str, object] = field(default_factory=dict)
    """how inputs were made of what lay in files, as JSON values: a model is of no use without"""

    def called(self, client: int) -> str:
        """A client as texts name it: by its number, and its name where it has one."""
        return called(client, self.client_names)

    @cached_property
    def training_clients(self) -> Sequence[int]:
        """Ids of the clients that train, ascending."""
        everyone = range(len(self.clients))
        seen = everyone[: len(everyone) - len(self.unseen)]
        if len(everyone) >= MANY and self.unseen.isdisjoint(seen):
            return seen
        return tuple(c for c in everyone if c not in self.unseen)

    @cached_property
    def sizes(self) -> Tensor:
        """How many training examples each client has."""
        if isinstance(self.clients, ClientRows):
            return self.clients.sizes
        return torch.tensor([len(rows) for rows in self.clients], dtype=torch.int64)

    @property
    def in_channels(self) -> int:
        return int(self.x.shape[1])

    @property
    def pool(self) -> Pool:
        """The training examples, without anything about tests."""
        return Pool(
            x=self.x,
            y=self.y,
            rows=self.clients,
            clients=self.training_clients,
            mean=self.mean,
            std=self.std,
            ignore_index=self.ignore_index,
        )


Examples = tuple[Tensor, Tensor] | torch.utils.data.Dataset[object]


def as_tensors(examples: Examples, who: str, task: str = "classification") -> tuple[Tensor, Tensor]:
    """(x, y) tensors from a pair of tensors or from any map-style `Dataset` of (x, y) items."""
    classes = task == "classification"
    if isinstance(examples, tuple):
        x, y = examples
    else:
        items = [examples[i] for i in range(len(examples))]  # type: ignore[arg-type]
        if not items:
            raise ConfigError(f"{who} has no examples; leave it out or give it data")
        x = torch.stack([torch.as_tensor(item[0]) for item in items])  # type: ignore[index]
        y = torch.stack([torch.as_tensor(item[1]) for item in items])  # type: ignore[index]
    if len(x) != len(y):
        raise ConfigError(f"{who} has {len(x)} inputs and {len(y)} labels; each input needs one label")
    if len(x) == 0:
        raise ConfigError(f"{who} has no examples; leave it out or give it data")
    return x, y.to(torch.int64) if classes else y


def from_clients(
    train: Sequence[Examples],
    test: Sequence[Examples] | Examples,
    *,
    task: str | None = None,
    num_classes: int | None = None,
    name: str = "own data",
) -> Federation:
    """A federation from users' own data: one data set per client, and one test set per client or for all.

    >>> x, y = torch.zeros(4, 3), torch.tensor([0, 1, 0, 1])
    >>> from_clients([(x, y), (x, y)], (x, y)).clients[1].tolist()
    [4, 5, 6, 7]
    """
    if not train:
        raise ConfigError("no client data was given; pass a list with one data set per client")
    task = task or "classification"
    pools = [as_tensors(part, f"client {c}", task) for c, part in enumerate(train)]
    per_client = isinstance(test, Sequence) and not isinstance(test, tuple)
    parts = cast("Sequence[Examples]", test if per_client else [test])
    if per_client and len(parts) != len(train):
        raise ConfigError(f"{len(train)} clients but {len(parts)} test sets; give one per client, or one for all")
    tests = [as_tensors(part, f"test set {c}", task) for c, part in enumerate(parts)]
    own = consecutive_rows([len(y) for _, y in tests])
    y = torch.cat([part for _, part in pools])
    test_y = torch.cat([part for _, part in tests])
    return Federation(
        name=name,
        x=torch.cat([part for part, _ in pools]),
        y=y,
        clients=consecutive_rows([len(part) for _, part in pools]),
        test_x=torch.cat([part for part, _ in tests]),
        test_y=test_y,
        own_test=own if per_client else (own[0],) * len(train),
        num_classes=num_classes or _num_outputs(y, test_y),
        task=task,
    )


def _num_outputs(y: Tensor, test_y: Tensor) -> int:
    """Classes where targets are class numbers, else how many numbers there are for each example."""
    if y.dim() == 1 and not y.is_floating_point():
        return int(max(y.max(), test_y.max())) + 1
    return int(y.shape[1]) if y.dim() > 1 else 1
