"""Batches without state: a client's k-th lifetime batch is a pure function of (seed, client, k).

Within an epoch no example comes twice; each epoch has its own order. Nothing needs to be saved to resume.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fednorm.core import rng
from fednorm.errors import ConfigError


def batches_per_epoch(num_examples: int, batch_size: int) -> int:
    """How many batches one pass over the data has.

    A trailing partial batch counts, except one of a single example, which BatchNorm1d could not run on; a client with
    one example in all still has one batch.

    >>> [batches_per_epoch(n, 20) for n in (1, 19, 20, 21, 22)]
    [1, 1, 1, 1, 2]
    """
    if batch_size < 1:
        raise ConfigError(f"the batch size must be at least 1, not {batch_size}")
    if num_examples < 1:
        raise ConfigError("a client without examples has no batches; leave it out or use a larger min_size")
    full, rest = divmod(num_examples, batch_size)
    return full + (rest > 1 or full == 0)


def epoch_order(seed: int, client: int | Tensor, num_examples: int, epoch: int | Tensor) -> Tensor:
    """The order of a client's examples in one of its epochs, on the CPU; of clients of one size, a row each."""
    return rng.permutation(rng.key(seed, "batch", client, epoch), num_examples)


def batch_rows(seed: int, client: int, rows: Tensor, batch_size: int, k: int) -> Tensor:
    """The rows of the client's k-th batch, in the order of that epoch.

    >>> import torch
    >>> rows = torch.arange(100, 104)
    >>> sorted(torch.cat([batch_rows(0, 3, rows, 2, k) for k in (0, 1)]).tolist())
    [100, 101, 102, 103]
    """
    return Stream(seed, client, rows, batch_size).batch(k)


class Stream:
    """The batches of one client; keeps some epochs' orders at hand, which changes nothing but the speed."""

    def __init__(self, seed: int, client: int, rows: Tensor, batch_size: int) -> None:
        self.seed = seed
        self.client = client
        self.rows = rows
        self.batch_size = batch_size
        self.count = len(rows)
        self.batches_per_epoch = batches_per_epoch(self.count, batch_size)
        self.all_full = self.batches_per_epoch * batch_size <= self.count
        self._epochs: dict[int, Tensor] = {}

    def batch(self, k: int) -> Tensor:
        """The rows of batch number k, counted from 0 over the client's whole life."""
        if k < 0:
            raise ConfigError(f"batches are counted from 0, not {k}")
        epoch, index = divmod(k, self.batches_per_epoch)
        return self._epoch_rows(epoch)[index * self.batch_size : (index + 1) * self.batch_size]

    def size(self, k: int) -> int:
        """How many rows batch number k has."""
        return min(self.batch_size, self.count - k % self.batches_per_epoch * self.batch_size)

    def sizes(self, first: int, steps: int) -> set[int]:
        """The sizes among some batches in a row: full ones, and that of the last of an epoch."""
        if self.all_full:
            return {self.batch_size}
        last = first + (-first - 1) % self.batches_per_epoch
        return {self.size(k) for k in (first, first + 1, last) if k < first + steps}

    def alike_from(self, first: int, most: int) -> int:
        """How many batches from one on have its size, of some at most.

        >>> stream = Stream(0, 0, torch.arange(10), 4)  # batches of 4, 4 and 2
        >>> [stream.alike_from(first, 9) for first in (0, 1, 2, 3)]
        [2, 1, 1, 2]
        """
        if self.all_full or self.batches_per_epoch == 1:
            return most
        return min(most, max(1, self.batches_per_epoch - 1 - first % self.batches_per_epoch))

    def span(self, first: int, steps: int) -> Tensor:
        """The rows of some batches in a row, one after the other."""
        parts = []
        while steps:
            epoch, index = divmod(first, self.batches_per_epoch)
            taken = min(steps, self.batches_per_epoch - index)
            parts.append(self._epoch_rows(epoch)[index * self.batch_size : (index + taken) * self.batch_size])
            first, steps = first + taken, steps - taken
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def lacks(self, first: int, steps: int) -> list[int]:
        """The epochs of some batches in a row whose orders are not at hand; those of epochs before are put away."""
        wanted = range(first // self.batches_per_epoch, (first + steps - 1) // self.batches_per_epoch + 1)
        self._epochs = {epoch: rows for epoch, rows in self._epochs.items() if epoch in wanted}
        return [epoch for epoch in wanted if epoch not in self._epochs]

    def prime(self, epoch: int, order: Tensor) -> None:
        """Take over an epoch's order, which somebody drew for many clients at once."""
        self._epochs[epoch] = self.rows[order.to(self.rows.device)]

    def _epoch_rows(self, epoch: int) -> Tensor:
        if epoch not in self._epochs:
            self._epochs.clear()
            self.prime(epoch, epoch_order(self.seed, self.client, self.count, epoch))
        return self._epochs[epoch]
