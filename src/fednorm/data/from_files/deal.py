"""Rows from users' files to clients: as the files say, or by a partition; and what is set aside for tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fednorm.data.build import make_federation, strata, stratified_rows
from fednorm.data.client_rows import client_rows
from fednorm.data.federation import Federation
from fednorm.data.from_files.file_set import OPEN, TEST, TRAIN, FileSet
from fednorm.data.from_files.problems import MOST, refuse
from fednorm.data.image_set import ImageSet
from fednorm.data.partition import find_partition, generator, largest_remainder
from fednorm.errors import ConfigError

OWN = "own"
"""The partition of data that bring their clients."""


def deal(
    files: FileSet,
    *,
    partition: str,
    options: Mapping[str, Any],
    num_clients: int,
    seed: int,
    unseen: int = 0,
    min_size: int = 2,
    train_limit: int | None = None,
    test_fraction: float = 0.2,
) -> Federation:
    """The federation of these rows; what the files leave open is drawn by the seed."""
    split = drawn_split(files, seed, test_fraction)
    rows = [torch.nonzero(split == part)[:, 0] for part in (TRAIN, TEST)]
    if not len(rows[1]):
        refuse([f"'{files.name}' has no test examples; mark some as test, or leave the split away"], files.name)
    dealt = ImageSet(
        name=files.name,
        train_x=_take(files.x, rows[0]),
        train_y=_take(files.y, rows[0]),
        test_x=_take(files.x, rows[1]),
        test_y=_take(files.y, rows[1]),
        num_classes=files.num_classes,
        classes=files.classes,
        train_domain=None if files.client is None else files.client[rows[0]],
        test_domain=None if files.client is None else files.client[rows[1]],
        domain_names=files.client_names,
        task=files.task,
    )
    if files.client is not None:
        federation = own_clients(dealt, seed=seed, unseen=unseen, min_size=min_size, train_limit=train_limit)
    else:
        _check_partition(files, partition, options)
        federation = make_federation(
            dealt,
            partition,
            num_clients,
            seed=seed,
            unseen=unseen,
            min_size=min_size,
            train_limit=train_limit,
            **dict(options),
        )
    return files.finish(replace(federation, notes=(*files.notes, *_about_tests(files, test_fraction))))


def _take(tensor: Tensor, rows: Tensor) -> Tensor:
    """Some rows; without a copy where they lie one after the other."""
    if len(rows) and int(rows[-1]) - int(rows[0]) + 1 == len(rows):
        return tensor[int(rows[0]) : int(rows[-1]) + 1]
    return tensor[rows]


def drawn_split(files: FileSet, seed: int, test_fraction: float) -> Tensor:
    """What each row is for; of a client's open rows a share is drawn for tests, with its mix of classes.

    A client with two rows or more keeps at least one for either.
    """
    split = files.split.numpy().copy()
    open_rows = np.flatnonzero(split == OPEN)
    if not len(open_rows):
        return files.split
    codes = strata(files.y, None, 1)[open_rows]
    owner = np.zeros(len(open_rows), dtype=np.int64) if files.client is None else files.client.numpy()[open_rows]
    order = np.argsort(owner, kind="stable")
    clients, starts = np.unique(owner[order], return_index=True)
    split[open_rows] = TRAIN
    for client, places in zip(clients, np.split(order, starts[1:]), strict=True):
        wanted = min(len(places) - 1, max(1, round(len(places) * test_fraction)))
        values, counts = np.unique(codes[places], return_counts=True)
        draw = generator(seed, "test rows", int(client))
        for value, quota in zip(values, largest_remainder(counts.astype(np.float64), wanted), strict=True):
            chosen = draw.permutation(places[codes[places] == value])[:quota]
            split[open_rows[chosen]] = TEST
    return torch.from_numpy(split)


def _about_tests(files: FileSet, test_fraction: float) -> tuple[str, ...]:
    count = int((files.split == OPEN).sum())
    if not count:
        return ()
    whose = "the rows" if files.client is None else "each client's examples"
    some = "" if count == len(files.split) else " where nothing says what is for tests"
    share = f"{100 * test_fraction:g} % of {whose}"
    mix = " with the mix of classes" if files.task == "classification" else ""
    return (f"{share}, drawn by the seed{mix}, are set aside for tests{some}",)


def own_clients(
    dealt: ImageSet, *, seed: int, unseen: int, min_size: int, train_limit: int | None = None
) -> Federation:
    """A federation of a set whose domains are its clients."""
    names = dealt.domain_names
    if not 0 <= unseen < len(names):
        raise ConfigError(f"data.unseen={unseen} leaves no client of {len(names)} to train; give less")
    if train_limit is not None and train_limit < len(dealt.train_y):
        dealt = dealt.keep(torch.from_numpy(stratified_rows(dealt, train_limit, seed)))
    train, test = (_rows_of(domain, len(names)) for domain in (dealt.train_domain, dealt.test_domain))
    refuse(_too_small(train, test, dealt, min_size), dealt.name)
    return Federation(
        name=dealt.name,
        x=dealt.train_x,
        y=dealt.train_y,
        clients=client_rows(train),
        test_x=dealt.test_x,
        test_y=dealt.test_y,
        own_test=client_rows(test),
        num_classes=dealt.num_classes,
        classes=dealt.classes,
        unseen=frozenset(range(len(names) - unseen, len(names))),
        task=dealt.task,
        client_names=names,
    )


def _rows_of(domain: Tensor | None, count: int) -> tuple[Tensor, ...]:
    """The rows of every client, ascending."""
    owner = torch.zeros(0, dtype=torch.int64) if domain is None else domain
    order = torch.argsort(owner, stable=True)
    return order.split(torch.bincount(owner, minlength=count).tolist())


def _too_small(train: tuple[Tensor, ...], test: tuple[Tensor, ...], dealt: ImageSet, min_size: int) -> list[str]:
    problems: list[str] = []
    for name, rows, own in zip(dealt.domain_names, train, test, strict=True):
        if len(rows) >= max(min_size, 1) or len(problems) == MOST:
            continue
        if not len(rows):
            only = " (all are for tests)" if len(own) else ""
            problems.append(f"client '{name}' has no training examples{only}; give it some, or leave it out")
        else:
            many = "1 training example" if len(rows) == 1 else f"{len(rows)} training examples"
            problems.append(
                f"client '{name}' has {many}, fewer than data.min_size={min_size}; give it more, or leave it out"
            )
    return problems


def _check_partition(files: FileSet, partition: str, options: Mapping[str, object]) -> None:
    if partition == OWN:
        column = "; give --client-column COL" if files.name.startswith("table:") else ", as an array 'client'"
        raise ConfigError(f"partition 'own' needs data that name their clients{column}, or another partition")
    if find_partition(partition, options).uses_labels and files.task != "classification":
        raise ConfigError(
            f"partition '{partition}' divides by class, but the task is {files.task}; use --partition iid"
        )
