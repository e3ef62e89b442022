"""Columns of a table as numbers for a model: standardised, and one column for each category."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from fednorm.data.client_rows import shared_row
from fednorm.data.federation import Federation
from fednorm.data.from_files.problems import listed
from fednorm.data.from_files.scaling import training_rows
from fednorm.data.from_files.table_file import Column
from fednorm.errors import ConfigError

Scale = Literal["pooled", "client", "none"]


@dataclass(frozen=True)
class TableInputs:
    """Finishes the federation of a table: its `x` are numbers of rows until it is known who trains on which."""

    columns: tuple[Column, ...]
    standardize: Scale

    def __call__(self, federation: Federation) -> Federation:
        """The federation with the inputs themselves, how they were made, and a line that says so."""
        if self.standardize == "client" and (shared := shared_row(federation.clients)) is not None:
            raise ConfigError(
                f"data.standardize=client scales a row by its client's numbers, but row {shared} is dealt more than "
                "once; leave out size in data.partition, or give data.standardize=pooled"
            )
        train, test = federation.x.numpy(), federation.test_x.numpy()
        used = train[training_rows(federation).numpy()]
        owner = _Owners(federation, int(max(train.max(), test.max())) + 1)
        width = sum(1 if column.kind != "text" else len(np.unique(column.values[used])) for column in self.columns)
        pools = [np.zeros((len(rows), width), dtype=np.float32) for rows in (train, test)]
        at = 0
        about: list[dict[str, Any]] = []
        for column in self.columns:
            if column.kind == "text":
                values = np.unique(column.values[used])
                about.append({"name": column.name, "kind": "category", "values": values.tolist()})
                for value in values:
                    for pool, rows in zip(pools, (train, test), strict=True):
                        pool[:, at] = column.values[rows] == value
                    at += 1
                continue
            scaled, facts = owner.scaled(column, used, self.standardize)
            about.append({"name": column.name, "kind": "number", **facts})
            for pool, rows in zip(pools, (train, test), strict=True):
                pool[:, at] = scaled[rows]
            at += 1
        made = replace(
            federation,
            x=torch.from_numpy(pools[0]),
            test_x=torch.from_numpy(pools[1]),
            notes=(*federation.notes, *_notes(about, self.standardize, len(used), width)),
            preprocessing={"kind": "table", "standardize": self.standardize, "columns": about},
        )
        return made if federation.task != "regression" or self.standardize == "none" else _scaled_targets(made)


def _scaled_targets(federation: Federation) -> Federation:
    """Targets of mean 0 and deviation 1 over all clients that train, or the usual learning rates would diverge.

    Pooled also where inputs are scaled by each client: the clients' outputs must mean the same.
    """
    used = federation.y[training_rows(federation)].double()
    mean = used.mean(0)
    std = used.std(0, correction=0)
    std = torch.where(std > 0, std, 1.0)
    y, test_y = (((part.double() - mean) / std).float() for part in (federation.y, federation.test_y))
    shown = ["/".join(f"{value:.4g}" for value in part.reshape(-1).tolist()) for part in (mean, std)]
    note = f"the target is standardised too, mean {shown[0]} and deviation {shown[1]}: errors are in such deviations"
    about = {**federation.preprocessing, "target": {"mean": mean.tolist(), "std": std.tolist()}}
    return replace(federation, y=y, test_y=test_y, notes=(*federation.notes, note), preprocessing=about)


class _Owners:
    """Which client a row belongs to, and what follows for the scale of a column."""

    def __init__(self, federation: Federation, num_rows: int) -> None:
        self.count = len(federation.clients)
        self.of_row = np.zeros(num_rows, dtype=np.int64)
        self.trains = np.zeros(num_rows, dtype=bool)
        for client, (rows, own) in enumerate(zip(federation.clients, federation.own_test, strict=True)):
            self.of_row[federation.x.numpy()[rows.numpy()]] = client
            self.trains[federation.x.numpy()[rows.numpy()]] = True
            self.of_row[federation.test_x.numpy()[own.numpy()]] = client

    def scaled(self, column: Column, used: np.ndarray, how: Scale) -> tuple[np.ndarray, dict[str, Any]]:
        """The column in its new scale, a missing number as the mean; and the statistics that made it."""
        values = column.values[: len(self.of_row)]
        mean, std = _mean_and_std(values[used])
        if how == "client":
            means, stds = self._by_client(values, mean, std)
            filled = np.where(np.isnan(values), means[self.of_row], values)
            return (filled - means[self.of_row]) / stds[self.of_row], {"mean": means.tolist(), "std": stds.tolist()}
        filled = np.where(np.isnan(values), mean, values)
        facts = {"mean": mean, "std": std}
        return (filled, facts) if how == "none" else ((filled - mean) / std, facts)

    def _by_client(self, values: np.ndarray, mean: float, std: float) -> tuple[np.ndarray, np.ndarray]:
        """Each client's mean and deviation over its training rows; everybody's where it has no number at all."""
        rows = np.flatnonzero(self.trains & ~np.isnan(values))
        owner, own = self.of_row[rows], values[rows]
        counts = np.bincount(owner, minlength=self.count)
        some = np.maximum(counts, 1)
        means = np.where(counts > 0, np.bincount(owner, own, self.count) / some, mean)
        spread = np.sqrt(np.bincount(owner, (own - means[owner]) ** 2, self.count) / some)
        return means, np.where(counts > 0, np.where(spread > 0, spread, 1.0), std)


def _mean_and_std(values: np.ndarray) -> tuple[float, float]:
    """Over the numbers that are there; a column that never changes keeps its scale."""
    there = values[~np.isnan(values)]
    if not len(there):
        return 0.0, 1.0
    return float(there.mean()), float(there.std()) or 1.0


def _notes(about: Sequence[dict[str, Any]], how: Scale, rows: int, width: int) -> list[str]:
    numbers = [column for column in about if column["kind"] == "number"]
    categories = [column for column in about if column["kind"] == "category"]
    kinds = {"number": len(numbers), "category": len(categories)}
    notes = [f"{width} inputs; columns by kind: {', '.join(f'{kind} {count}' for kind, count in kinds.items())}"]
    if numbers and how == "pooled":
        shown = listed([f"{column['name']} {column['mean']:.4g} ± {column['std']:.4g}" for column in numbers])
        notes.append(
            f"numbers standardised over the {rows} training rows of all clients that train, which pools means and "
            f"deviations over clients: {shown}"
        )
    if numbers and how == "client":
        notes.append("numbers standardised by each client's own training rows: no mean or deviation leaves a client")
    if numbers and how == "none":
        notes.append("numbers taken as they are (data.standardize=none)")
    if categories:
        shown = listed([f"{column['name']} ({len(column['values'])})" for column in categories])
        notes.append(f"categories as columns of 0 and 1, all 0 for one not seen in training: {shown}")
    return notes
