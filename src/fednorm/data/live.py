"""Examples that are read when they are needed: items that change from read to read, or too many for memory.

An item is read with Python's, numpy's and torch's generators set from the key of its batch and from its number, so it
is a function of (seed, client, k, item): the same after a restart, in any order, in any process.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fednorm.core import rng
from fednorm.data.items import kind_of, name_of
from fednorm.data.source import Source, own_generators, seed_generators
from fednorm.errors import ConfigError, ExampleError, first_line

AHEAD = 2
"""Batches that each process has ready or in work before they are asked for."""

Batch = tuple[Tensor, Tensor]


def usual_loaders() -> int:
    """Processes that read data where nobody says how many: one for each core, up to four; on one core, none."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(4, cores) if cores > 1 else 0


class Order(NamedTuple):
    """Which items of which sources, each with its seed."""

    sources: list[int]
    items: list[int]
    seeds: list[int]


class Failure(NamedTuple):
    """What went wrong in another process."""

    kind: type[ConfigError]
    text: str


@dataclass(frozen=True)
class Form:
    """What all examples look like."""

    who: str
    x_shape: torch.Size
    x_dtype: torch.dtype
    y_shape: torch.Size
    y_dtype: torch.dtype
    targets: torch.dtype
    """what labels are made to be"""
    num_classes: int | None = None
    """labels of one number must be below"""

    @property
    def bytes(self) -> int:
        """Of one example."""
        return self.x_shape.numel() * self.x_dtype.itemsize + self.y_shape.numel() * self.targets.itemsize

    def empty(self, count: int = 0) -> Batch:
        """Room for some examples; none, to show what they look like."""
        x = torch.empty(count, *self.x_shape, dtype=self.x_dtype)
        return x, torch.empty(count, *self.y_shape, dtype=self.targets)

    def differs(self, x: Tensor, y: Tensor) -> str | None:
        """Why an example cannot be used together with the others."""
        for what, value, shape, dtype in (
            ("the input", x, self.x_shape, self.x_dtype),
            ("the label", y, self.y_shape, self.y_dtype),
        ):
            if value.shape != shape:
                return (
                    f"{what} has shape {tuple(value.shape)}, but {tuple(shape)} at {self.who}; bring all to one shape"
                )
            if kind_of(value.dtype) != kind_of(dtype):
                return f"{what} is {name_of(value.dtype)}, but {name_of(dtype)} at {self.who}; bring all to one type"
            if value.is_floating_point() and not bool(value.sum().isfinite()) and not bool(value.isfinite().all()):
                return f"{what} has numbers that are not finite; replace or leave out what is missing"
        if self.num_classes is not None and y.dim() == 0 and not 0 <= int(y) < self.num_classes:
            return (
                f"label {int(y)} is not one of the {self.num_classes} classes; number them 0 to {self.num_classes - 1}"
            )
        return None


class Reader(Dataset[Batch | Failure]):
    """The items of some sources by number; all that a process needs to read them."""

    def __init__(self, sources: Sequence[Source], form: Form) -> None:
        self.sources = tuple(sources)
        self.form = form
        self.starts = np.cumsum([0, *(len(source) for source in self.sources)])

    def order(self, rows: Tensor, key: Tensor) -> Order:
        """Some rows, the sources one after the other, each with a seed from the key and from its own number."""
        where = rows.cpu().numpy()
        sources = np.searchsorted(self.starts, where, side="right") - 1
        items = where - self.starts[sources]
        keys = rng.key(key.cpu(), "item", torch.from_numpy(sources), torch.from_numpy(items))
        seeds = [seed & ((1 << 63) - 1) for seed in keys.tolist()]
        return Order(sources.tolist(), items.tolist(), seeds)

    def read(self, order: Order) -> Batch:
        """The examples of an order."""
        xs: list[Tensor] = []
        ys: list[Tensor] = []
        with own_generators():
            for number, item, seed in zip(*order, strict=True):
                source = self.sources[number]
                seed_generators(seed)
                x, y = source.item(item)
                if problem := self.form.differs(x, y):
                    raise ExampleError(f"{source.who}, item {item}: {problem}")
                xs.append(x)
                ys.append(y)
        return torch.stack(xs).to(self.form.x_dtype), torch.stack(ys).to(self.form.targets)

    def __getitem__(self, order: Order) -> Batch | Failure:
        """For a process of its own: an error as a value, since it would come back with pages around its text."""
        try:
            return self.read(order)
        except ConfigError as error:
            return Failure(type(error), str(error))


class LiveRows:
    """The rows of a pool that lie in users' data sets, one source after the other."""

    def __init__(self, sources: Sequence[Source], form: Form, *, loaders: int = 0) -> None:
        self.sources = tuple(sources)
        self.form = form
        self.loaders = loaders
        """processes that read ahead; none: batches are read here, when they are asked for"""
        self._reader = Reader(sources, form)
        self._queue: _Queue | None = None
        self._with: dict[int, LiveRows] = {}

    def __len__(self) -> int:
        return int(self._reader.starts[-1])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_queue": None, "_with": {}}

    def with_loaders(self, loaders: int) -> LiveRows:
        """The same rows, read by this many processes; the same object each time, whose processes go on."""
        if loaders not in self._with:
            self._with[loaders] = LiveRows(self.sources, self.form, loaders=loaders)
        return self._with[loaders]

    def close(self) -> None:
        """End the processes that read; they are started again when they are needed."""
        if self._queue is not None:
            self._queue.close()
            self._queue = None

    def each(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Batch]:
        """The examples of some batches in turn, each given as (rows, key); the next ones are read ahead."""
        reader = self._reader
        orders = (reader.order(rows, key) for rows, key in batches)
        if not self.loaders:
            yield from map(reader.read, orders)
            return
        if self._queue is None:
            self._queue = _Queue(reader, self.loaders)
            # Collected in a cycle, its processes could no longer be told to end, and would be waited for.
            weakref.finalize(self, self._queue.close)
        yield from self._queue.each(orders)

    def parts(self, rows: Tensor | None, size: int) -> Iterator[Batch]:
        """Rows in parts of some size, the same in every read: what is tested must not change between two tests."""
        rows = torch.arange(len(self)) if rows is None else rows
        key = rng.key("test")
        return self.each((part, key) for part in rows.split(size) if len(part))


class _Orders:
    """What the loader's processes are to read; filled anew for each use."""

    def __init__(self) -> None:
        self.coming: Iterator[Order] = iter(())

    def __iter__(self) -> Iterator[Order]:
        return self.coming


class _Queue:
    """Processes that read batches ahead, and live from the first use on."""

    def __init__(self, reader: Reader, loaders: int) -> None:
        self._reader = reader
        self._orders = _Orders()
        self._loader: DataLoader[Any] | None = _start(reader, self._orders, loaders)
        self._busy = False

    def close(self) -> None:
        """End the processes."""
        self._loader = None

    def each(self, orders: Iterator[Order]) -> Iterator[Batch]:
        """The examples of some orders in turn."""
        if self._busy or self._loader is None:  # two at once: the second one reads for itself
            yield from map(self._reader.read, orders)
            return
        self._busy = True
        ahead: deque[Order] = deque()
        try:
            yield from self._loaded(self._loader, orders, ahead)
        except _LostReaders as lost:
            print(f"a process that reads data was lost ({lost}); reading goes on in this one", file=sys.stderr)
            self.close()
            yield from map(self._reader.read, (*ahead, *orders))
        finally:
            self._busy = False
            self._orders.coming = iter(())

    def _loaded(self, loader: DataLoader[Any], orders: Iterator[Order], ahead: deque[Order]) -> Iterator[Batch]:
        def remembered() -> Iterator[Order]:
            for order in orders:
                ahead.append(order)
                yield order

        self._orders.coming = remembered()
        try:
            with warnings.catch_warnings():  # that a fork may meet threads; these processes do nothing but read
                warnings.simplefilter("ignore")
                found = iter(loader)
        except RuntimeError as error:
            raise _LostReaders(first_line(error)) from error
        while True:
            try:
                batch = next(found)
            except StopIteration:
                return
            except RuntimeError as error:  # killed, or out of shared memory
                raise _LostReaders(first_line(error)) from error
            if isinstance(batch, Failure):
                raise batch.kind(batch.text)
            ahead.popleft()
            yield batch


class _LostReaders(Exception):
    """A process that reads has ended before its time."""


def _start(reader: Reader, orders: _Orders, loaders: int) -> DataLoader[Any]:
    """A fork has the user's data set and its functions as they are; a new interpreter would have to import them."""
    methods = torch.multiprocessing.get_all_start_methods()
    return DataLoader(
        reader,
        batch_size=None,
        sampler=orders,
        num_workers=loaders,
        collate_fn=_as_it_is,
        worker_init_fn=_leave_signals,
        multiprocessing_context="fork" if "fork" in methods else None,
        generator=torch.Generator(),  # it draws a number for its processes, which would otherwise be a layer's
        prefetch_factor=AHEAD,
        persistent_workers=True,
    )


def _as_it_is(batch: Any) -> Any:
    return batch


def _leave_signals(number: int) -> None:
    """An interrupt at the terminal is for the run, which finishes its round first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
