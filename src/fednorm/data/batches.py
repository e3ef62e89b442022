"""Batches of clients: which rows, how augmented, with which key, all a function of (seed, client, k)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from fednorm.core import rng
from fednorm.data.augment import Augmentation, apply, draws
from fednorm.data.augment import parse as parse_augmentation
from fednorm.data.pool import Pool
from fednorm.data.streams import Stream, epoch_order

UNION = -1
"""The id of the one client of a centralized run, which owns everybody's data."""


def num_held(size: int, val_fraction: float) -> int:
    """How many of a client's examples validate."""
    return round(size * val_fraction)


@dataclass(frozen=True)
class Batches:
    """The training batches of a pool's clients, with validation rows set aside."""

    pool: Pool
    seed: int
    batch_size: int
    union_batch_size: int
    augmentation: str = "none"
    val_fraction: float = 0.0
    dtype: torch.dtype = torch.float32
    remembered: int = 4096
    """how many clients' rows and epochs are kept at hand; more than a cohort, or every step shuffles anew"""

    @cached_property
    def split(self) -> Callable[[int], tuple[Tensor, Tensor]]:
        """(training rows, validation rows) of a client; which rows validate depends on seed and client alone."""
        return lru_cache(self.remembered)(self._split)

    def _split(self, client: int) -> tuple[Tensor, Tensor]:
        rows = self.pool.rows[client]
        count = num_held(len(rows), self.val_fraction)
        if not count:
            return rows, rows[:0]
        order = rng.permutation(rng.key(self.seed, "validation", client), len(rows))
        held = order[:count].sort().values
        kept = order[count:].sort().values
        return rows[kept], rows[held]

    def rows(self, client: int) -> Tensor:
        """Training rows of a client, or of all training clients together."""
        if client == UNION:
            return torch.cat([self.split(c)[0] for c in self.pool.clients])
        return self.split(client)[0]

    @cached_property
    def stream(self) -> Callable[[int], Stream]:
        """The batches of a client over its life."""
        return lru_cache(self.remembered)(self._stream)

    def _stream(self, client: int) -> Stream:
        size = self.union_batch_size if client == UNION else self.batch_size
        return Stream(self.seed, client, self.rows(client), size)

    def num_examples(self, client: int) -> int:
        return self.stream(client).count

    def per_epoch(self, client: int) -> int:
        return self.stream(client).batches_per_epoch

    def batch(self, client: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """(x, y, key) of the client's k-th batch; the key serves the random layers of the model."""
        rows, key = self.rows_and_key(client, k)
        return *self.take(rows, key), key

    def rows_and_key(self, client: int, k: int) -> tuple[Tensor, Tensor]:
        """(rows of the pool, key) of the client's k-th batch, where the data is."""
        device = self.pool.x.device
        rows, key = self._rows_and_key(client, k)
        return rows.to(device), key.to(device)

    def take(self, rows: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """(x, y) of one batch."""
        if self.pool.live:
            return next(self.each([(rows, key)]))
        if self._chain.steps:
            x, y = self.gather(rows.unsqueeze(0), self.draws(key.unsqueeze(0), len(rows)))
            return x[0], y[0]
        x, y = self._examples(rows)
        return self.inputs(x), y

    def each(self, taken: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """(x, y) of some batches in turn, given as (rows, key); where data are read, the next ones are read ahead."""
        if not self.pool.live:
            for rows, key in taken:
                yield self.take(rows, key)
            return
        known = list(taken)
        for (rows, key), (x, y) in zip(known, self.pool.live.each(known), strict=True):
            x, y = self._augmented(*self._at_home(x[None], y[None]), self.draws(key[None], len(rows)))
            yield x[0], y[0]

    def plain(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(x, y) of some rows, neither drawn nor augmented; where data are read, equal in every read."""
        if self.pool.live:
            x, y = self._at_home(*next(self.pool.live.parts(rows, len(rows))))
        else:
            chosen = rows.to(self.pool.x.device)
            x, y = self.pool.x[chosen], self.pool.y[chosen]
        return self.inputs(x), y

    def _at_home(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Examples that were read, on the device."""
        device = self.pool.x.device
        return x.to(device, non_blocking=True), y.to(device, non_blocking=True)

    def sizes(self, clients: Sequence[int], ks: Sequence[int]) -> list[int]:
        """How many examples these batches have."""
        return [self.stream(client).size(k) for client, k in zip(clients, ks, strict=True)]

    def stack(self, clients: Sequence[int], ks: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Batches of equal size of several clients, stacked: one gather and one augmentation for all."""
        if self.pool.live:
            return next(self.stacks([(clients, ks)]))
        device = self.pool.x.device
        rows, keys = (part.to(device) for part in self.rows_and_keys(clients, ks))
        return *self.gather(rows, self.draws(keys, rows.shape[-1])), keys

    def stacks(self, groups: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """`stack` for some groups of batches in turn; where data are read, the next ones are read ahead."""
        if not self.pool.live:
            for clients, ks in groups:
                yield self.stack(clients, ks)
            return
        drawn = [self.rows_and_keys(clients, ks) for clients, ks in groups]
        single = (pair for rows, keys in drawn for pair in zip(rows, keys, strict=True))
        read = self.pool.live.each(single)
        for rows, keys in drawn:
            x, y = (torch.stack(parts) for parts in zip(*(next(read) for _ in keys), strict=True))
            keys = keys.to(self.pool.x.device)
            yield *self._augmented(*self._at_home(x, y), self.draws(keys, rows.shape[-1])), keys

    def rows_and_keys(self, clients: Sequence[int], ks: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(rows of the pool, keys) of these batches, on the host: all that tells one batch from another."""
        each = zip(clients, ks, strict=True)
        rows, keys = zip(*(self._rows_and_key(client, k) for client, k in each), strict=True)
        return torch.stack(rows), torch.stack(keys)

    def _rows_and_key(self, client: int, k: int) -> tuple[Tensor, Tensor]:
        return self.stream(client).batch(k), rng.key(self.seed, "step", client, k)

    def span(self, clients: Sequence[int], firsts: Sequence[int], steps: int) -> tuple[Tensor, Tensor]:
        """(rows, keys) of some batches in a row of equal size, (step, client, ...), on the host."""
        self.draw_orders(clients, firsts, [steps] * len(clients))
        each = zip(clients, firsts, strict=True)
        rows = torch.stack([self.stream(client).span(first, steps).view(steps, -1) for client, first in each], 1)
        ks = torch.tensor(firsts) + torch.arange(steps).unsqueeze(1)
        return rows, self.keys(torch.tensor(clients), ks)

    def keys(self, clients: Tensor, ks: Tensor) -> Tensor:
        """The keys of these batches of these clients, one broadcast against the other."""
        return rng.key(self.seed, "step", clients, ks)

    def draw_orders(self, clients: Sequence[int], firsts: Sequence[int], steps: Sequence[int]) -> None:
        """Have the orders of all epochs of some batches at hand, drawn for all clients of one size at once."""
        wanting: dict[int, list[tuple[int, int]]] = {}
        for client, first, count in zip(clients, firsts, steps, strict=True):
            stream = self.stream(client)
            wanting.setdefault(stream.count, []).extend((client, epoch) for epoch in stream.lacks(first, count))
        for size, some in wanting.items():
            if some:
                who, epochs = torch.tensor(some).T
                for (client, epoch), order in zip(some, epoch_order(self.seed, who, size, epochs), strict=True):
                    self.stream(client).prime(epoch, order)

    @cached_property
    def _chain(self) -> Augmentation:
        return parse_augmentation(self.augmentation)

    def draws_of_one(self, size: int) -> tuple[int, int, int]:
        """The shape of what `draws` has for a key."""
        return size, len(self._chain.steps), 2

    def draws(self, keys: Tensor, size: int) -> Tensor:
        """The random numbers of the augmentation of batches of this size, (..., size, steps, 2), for keys (...)."""
        if not self._chain.steps:
            return torch.zeros(*keys.shape, *self.draws_of_one(size), dtype=torch.int64, device=keys.device)
        shape = (size, *self.pool.x.shape[-2:])
        own = rng.key(keys, "augment").flatten()
        return torch.vmap(lambda key: draws(key, shape, self._chain))(own).unflatten(0, keys.shape)

    def gather(self, rows: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """(x, y) of stacked batches, with nothing but work on the device, so that a CUDA graph can hold it."""
        x, y = (raw.unflatten(0, rows.shape) for raw in self._examples(rows.flatten()))
        return self._augmented(x, y, drawn)

    def _augmented(self, x: Tensor, y: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """(x, y) of stacked batches of raw examples."""
        if self._chain.steps:
            if y.dim() > 2:
                fill = self.pool.ignore_index
                x, y = torch.vmap(lambda x, y, drawn: apply(x, y, drawn, self._chain, fill))(x, y, drawn)
            else:
                x = torch.vmap(lambda x, drawn: apply(x, None, drawn, self._chain)[0])(x, drawn)
        return self.inputs(x), y

    def _examples(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The raw examples of a vector of rows; this selection is several times faster on a CPU than `[rows]`."""
        return self.pool.x.index_select(0, rows), self.pool.y.index_select(0, rows)

    def inputs(self, raw: Tensor) -> Tensor:
        """Raw rows as the model's numbers; inputs that are no numbers of that type (tokens) stay as they are."""
        x = self.pool.inputs(raw)
        return x.to(self.dtype) if x.is_floating_point() else x
