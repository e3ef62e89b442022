"""Targets, clients and splits of rows, from values of any kind to numbers; shared by tables and archives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fednorm.data.from_files.file_set import TEST, TRAIN
from fednorm.data.from_files.problems import listed
from fednorm.errors import ConfigError

MOST_CLASSES = 1000
"""More different whole numbers than this are taken for a quantity that somebody forgot to say is one."""

Where = Callable[[int], str]
"""The place of a row in its file, for an error: "line 7"."""


@dataclass(frozen=True)
class Labels:
    """Targets as a task wants them: int64 classes, or float32 numbers (N,) or (N, k)."""

    y: Tensor
    task: str
    num_classes: int
    """classes, or numbers that a model puts out"""
    classes: tuple[str, ...] = ()

    def note(self, what: str) -> str:
        """What was made of the target, for a user to see."""
        if self.task == "classification":
            return f"{what}: classification, {self.num_classes} classes ({listed(self.classes, 6)})"
        return f"{what}: {self.task}" + (f", {self.num_classes} numbers each" if self.num_classes > 1 else "")


def class_labels(values: np.ndarray, what: str) -> Labels:
    """Each different value is a class, numbers in their order, texts in theirs.

    >>> labels = class_labels(np.array(["b", "a", "b"]), "y")
    >>> labels.y.tolist(), labels.classes
    ([1, 0, 1], ('a', 'b'))
    """
    classes, codes = np.unique(values, return_inverse=True)
    if len(classes) < 2:
        raise ConfigError(f"{what} has one value only, '{name_of(classes[0])}'; give data with two classes or more")
    check_classes(len(classes), what)
    return Labels(torch.from_numpy(codes.reshape(-1)), "classification", len(classes), tuple(map(name_of, classes)))


def check_classes(count: int, what: str) -> None:
    """Refuse classes that can only be a quantity."""
    if count > MOST_CLASSES:
        raise ConfigError(f"{what} would make {count:,} classes; if it is a quantity, say --set task=regression")


def number_labels(values: np.ndarray, task: str | None, what: str) -> Labels:
    """Numbers (N,) for regression, or (N, k) for regression or, where all are 0 or 1, for many labels."""
    if not np.isfinite(values).all():
        raise ConfigError(f"{what} has numbers that are not finite; fill them in or remove their rows")
    y = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    binary = bool(np.isin(values, (0, 1)).all())
    chosen = task if task in ("regression", "multilabel") else "multilabel" if y.dim() == 2 and binary else "regression"
    if chosen == "multilabel" and not binary:
        raise ConfigError(f"{what} must be 0 or 1 for the task multilabel; give a column of 0 and 1 for each label")
    return Labels(y, chosen, 1 if y.dim() == 1 else y.shape[1])


def client_codes(values: np.ndarray) -> tuple[Tensor, tuple[str, ...]]:
    """The number of each row's client, and the clients' names in their order.

    >>> codes, names = client_codes(np.array([10, 2, 10]))
    >>> codes.tolist(), names
    ([1, 0, 1], ('2', '10'))
    """
    names, codes = np.unique(values, return_inverse=True)
    return torch.from_numpy(codes.reshape(-1)), tuple(map(name_of, names))


def split_codes(values: Sequence[object] | np.ndarray, what: str, where: Where, problems: list[str]) -> Tensor:
    """What each row is for, from the words train and test."""
    words = {"train": TRAIN, "test": TEST}
    different, codes = np.unique(np.asarray(values, dtype=np.str_), return_inverse=True)
    number = np.array([words.get(word.strip().lower(), -1) for word in different], dtype=np.int8)
    found = number[codes.reshape(-1)]
    wrong = np.flatnonzero(found < 0)
    if len(wrong):
        problems.append(f"{what}, {where(int(wrong[0]))}: '{values[int(wrong[0])]}' is neither train nor test")
    return torch.from_numpy(found)


def name_of(value: object) -> str:
    """A class or a client as text; whole numbers without a point.

    >>> name_of(np.float64(3.0)), name_of(np.str_("a"))
    ('3', 'a')
    """
    if isinstance(value, np.floating) and float(value).is_integer():
        return str(int(value))
    return str(value)
