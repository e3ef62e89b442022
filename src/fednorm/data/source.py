"""A user's data set, read one item at a time, with the random numbers of that item alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from fednorm.data.items import Columns, as_input, as_target, as_tensor, channels_first, find_columns, pair
from fednorm.errors import ConfigError, FednormError, UserCodeError, first_line


@dataclass(frozen=True)
class Arrays:
    """Examples that are in memory, or in a file that is mapped into it."""

    who: str
    x: Tensor
    y: Tensor
    mapped: bool = False
    """whether they lie in a file"""

    def __len__(self) -> int:
        return len(self.x)

    def item(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


@dataclass(frozen=True)
class Items:
    """Examples that a data set hands out by number."""

    who: str
    dataset: Any
    count: int
    columns: Columns | None = None

    def __len__(self) -> int:
        return self.count

    def item(self, index: int) -> tuple[Tensor, Tensor]:
        """Input and target of an item; what goes wrong names it."""
        try:
            given = self.dataset[index]
        except Exception as error:  # the user's own code may raise anything
            raise UserCodeError(
                f"{self.who}, item {index}: reading it failed with {type(error).__name__}: {first_line(error)}"
            ) from error
        try:
            x, y = pair(given, self.columns)
            return as_input(x), as_target(y)
        except FednormError as error:
            raise ConfigError(f"{self.who}, item {index}: {error}") from error


Source = Arrays | Items


def as_source(given: Any, who: str, columns: Columns | None = None) -> Source:
    """One client's examples: a pair of arrays, named columns, or anything with items that are counted from 0."""
    if isinstance(given, DataLoader):
        raise ConfigError(f"{who} is a DataLoader, which makes batches of its own; give its dataset, loader.dataset")
    if isinstance(given, Mapping):
        named = cast("Mapping[str, Any]", given)
        try:
            return _arrays(*pair(named, columns or find_columns(list(named))), who)
        except FednormError as error:
            raise error if str(error).startswith(who) else ConfigError(f"{who}: {error}") from error
    if is_pair(given):
        x, y = given
        return _arrays(x, y, who)
    if isinstance(given, Tensor | np.ndarray):
        raise ConfigError(f"{who} is an array alone; give inputs and labels as a pair (x, y)")
    if isinstance(given, IterableDataset) or not hasattr(given, "__getitem__") or not hasattr(given, "__len__"):
        raise ConfigError(
            f"{who} is {type(given).__name__}, whose items cannot be read by number; give a data set with "
            "__getitem__ and __len__, or list(...) of its items, or a pair (x, y) of arrays"
        )
    if len(given) == 0:
        raise ConfigError(f"{who} has no examples; leave it out or give it data")
    return Items(who, given, len(given), columns)


def is_pair(given: Any) -> bool:
    """Whether this is (x, y), arrays or lists, and not a list of two items."""
    if not isinstance(given, tuple | list) or len(cast("Sequence[Any]", given)) != 2:
        return False
    if isinstance(given, tuple):
        return True
    return all(isinstance(part, Tensor | np.ndarray) for part in cast("list[Any]", given))


def _arrays(x: Any, y: Any, who: str) -> Arrays:
    try:
        inputs = as_tensor(x, "the input")
        inputs = inputs if isinstance(x, Tensor) else channels_first(inputs, of_items=True)
        targets = as_tensor(y, "the label")
    except FednormError as error:
        raise ConfigError(f"{who}: {error}") from error
    for what, part in {"inputs": inputs, "labels": targets}.items():
        if part.dim() == 0:
            raise ConfigError(f"{who}: its {what} are one number; give an array with one entry for each example")
    if len(inputs) != len(targets):
        raise ConfigError(f"{who} has {len(inputs)} inputs and {len(targets)} labels; each input needs one label")
    if len(inputs) == 0:
        raise ConfigError(f"{who} has no examples; leave it out or give it data")
    return Arrays(who, inputs, targets, isinstance(x, np.memmap))


def known_labels(source: Source) -> Tensor | None:
    """The labels of all items where they can be had without reading the items; None where they cannot."""
    if isinstance(source, Arrays):
        return source.y
    found = _listed_labels(source.dataset, source.columns)
    if found is None:
        return None
    try:
        labels = torch.as_tensor(found)
    except (TypeError, ValueError, RuntimeError):
        return None
    return labels if labels.dim() >= 1 and len(labels) == len(source) else None


def _listed_labels(dataset: Any, columns: Columns | None) -> Any:
    """What data sets of torchvision call `targets`, a subset takes from the whole, and named columns hold."""
    if isinstance(dataset, torch.utils.data.Subset):
        whole = _listed_labels(cast("Any", dataset).dataset, columns)
        return None if whole is None else [whole[index] for index in dataset.indices]
    names = getattr(dataset, "column_names", None)
    if isinstance(names, list):
        try:
            return dataset[(columns or find_columns(cast("list[str]", names)))[1]]
        except Exception:  # columns that are not clear, or made anew with each item
            return None
    return next((getattr(dataset, name) for name in ("targets", "labels") if hasattr(dataset, name)), None)


@contextmanager
def own_generators() -> Iterator[None]:
    """Leave the program's random numbers as they were, whatever is seeded and drawn in between."""
    python, array, tensor = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(array)
        torch.set_rng_state(tensor)


def seed_generators(seed: int) -> None:
    """Set the generators that transforms draw from: Python's, numpy's and torch's."""
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    torch.default_generator.manual_seed(seed)
