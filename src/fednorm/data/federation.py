"""A federation's data: one pool of examples, and for each client the rows that are its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from fednorm.data.client_rows import MANY, ClientRows
from fednorm.data.live import LiveRows
from fednorm.data.pool import Pool
from fednorm.errors import ConfigError

Examples = tuple[Tensor, Tensor] | LiveRows
"""Raw inputs and labels, in memory or read when they are needed."""


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

    live: LiveRows | None = None
    """where the training examples are read when they are needed; `x` then shows what they look like, and `y` has their
    labels where these are known"""
    live_test: LiveRows | None = None

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
            live=self.live,
        )

    @property
    def labels_known(self) -> bool:
        """Whether `y` has the labels of all training examples."""
        return len(self.y) == self.num_examples

    def in_memory(self, purpose: str) -> None:
        """Refuse data that are read when they are needed, for a purpose that looks at all of them."""
        if self.live or self.live_test:
            raise ConfigError(f"{self.name} is not kept in memory, which {purpose} needs; read it with read='once'")

    @property
    def tests(self) -> Examples:
        """The test examples, as a scorer takes them."""
        return self.live_test or (self.test_x, self.test_y)

    @property
    def num_tests(self) -> int:
        return len(self.live_test or self.test_y)

    @property
    def num_examples(self) -> int:
        """How many training examples there are, whoever has them."""
        return len(self.live or self.y)
