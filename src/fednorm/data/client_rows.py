"""Rows of very many clients: what a tuple of tensors says, at a few bytes a client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import overload

import torch
from torch import Tensor

from fednorm.errors import ConfigError

MANY = 10_000
"""From this many clients on, compact forms take the place of tuples: a tensor for each client costs about 1 kB."""


class ClientRows(Sequence[Tensor]):
    """As `tuple[Tensor, ...]`, at 16 bytes a client beside the rows themselves.

    Client c has the positions starts[c] to stops[c] of `rows`, or of the pool itself where no rows are given. Clients
    may overlap.

    >>> rows = ClientRows(torch.tensor([0, 3]), torch.tensor([3, 4]))
    >>> len(rows), rows[0].tolist(), rows[-1].tolist(), rows.sizes.tolist()
    (2, [0, 1, 2], [3], [3, 1])
    """

    def __init__(self, starts: Tensor, stops: Tensor, rows: Tensor | None = None) -> None:
        if starts.shape != stops.shape or bool((starts > stops).any()):
            raise ConfigError("client rows need one start and one stop for each client, and no stop before its start")
        self.starts = starts
        self.stops = stops
        self.rows = rows

    @property
    def sizes(self) -> Tensor:
        return self.stops - self.starts

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, client: int) -> Tensor: ...
    @overload
    def __getitem__(self, client: slice) -> tuple[Tensor, ...]: ...
    def __getitem__(self, client: int | slice) -> Tensor | tuple[Tensor, ...]:
        if isinstance(client, slice):
            return tuple(self[c] for c in range(*client.indices(len(self))))
        start, stop = int(self.starts[client]), int(self.stops[client])
        return torch.arange(start, stop) if self.rows is None else self.rows[start:stop]


def client_rows(parts: Iterable[Tensor]) -> Sequence[Tensor]:
    """A tuple of each client's rows, or the compact form of it where there are many."""
    parts = tuple(parts)
    if len(parts) < MANY:
        return parts
    starts, stops = _bounds([len(part) for part in parts])
    return ClientRows(torch.tensor(starts), torch.tensor(stops), torch.cat(parts))


def consecutive_rows(sizes: Sequence[int]) -> Sequence[Tensor]:
    """The rows of clients that lie one after the other in the pool.

    >>> [rows.tolist() for rows in consecutive_rows([2, 1])]
    [[0, 1], [2]]
    """
    starts, stops = _bounds(sizes)
    if len(sizes) < MANY:
        return tuple(torch.arange(start, stop) for start, stop in zip(starts, stops, strict=True))
    return ClientRows(torch.tensor(starts), torch.tensor(stops))


def shared_row(clients: Iterable[Tensor]) -> int | None:
    """A row that more than one client has, or one client twice; None where each row is one client's.

    >>> shared_row([torch.tensor([0, 2]), torch.tensor([1])]), shared_row([torch.tensor([0, 2]), torch.tensor([2])])
    (None, 2)
    """
    times = torch.bincount(torch.cat(tuple(clients)))
    return int(times.argmax()) if int(times.max()) > 1 else None


def _bounds(sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    stops = list(accumulate(sizes))
    return [stop - size for stop, size in zip(stops, sizes, strict=True)], stops
