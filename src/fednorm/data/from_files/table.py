"""Rows of a table: which columns are the target, the client and the split, and which the inputs."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fednorm.data.from_files.file_set import OPEN, FileOptions, FileSet
from fednorm.data.from_files.inputs import TableInputs
from fednorm.data.from_files.labels import Labels, class_labels, client_codes, name_of, number_labels, split_codes
from fednorm.data.from_files.problems import MOST, listed, noted, refuse
from fednorm.data.from_files.source import Source
from fednorm.data.from_files.table_file import Column, Table, read_table_file
from fednorm.errors import ConfigError, unknown

MOST_CATEGORIES = 50
"""Different texts of one column that become columns of their own; more are names, dates or free text."""
_DATE = re.compile(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}")


def read_table(source: Source, options: FileOptions) -> FileSet:
    """Read a table and tell what each of its columns is for."""
    table = read_table_file(source.path, source)
    problems: list[str] = []
    named = _named(table, options, problems)
    refuse(problems, source)
    targets = [table.columns[name] for name in named["data.target"]]
    aside = {name for field in ("data.target", "data.client", "data.split") for name in named[field]}
    chosen = named["data.features"] or [name for name in table.columns if name not in aside]
    if not chosen:
        raise ConfigError(f"'{source.path}' has no columns beside {listed(sorted(aside))}; add some to learn from")
    inputs = [_input(table, table.columns[name], options, problems) for name in chosen]
    labels = Labels(torch.zeros(0), "", 0)
    with noted(problems):
        labels = _labels(table, targets, options.task, problems)
    codes, names = _clients(table, named["data.client"], problems)
    split = torch.full((table.num_rows,), OPEN, dtype=torch.int8)
    for name in named["data.split"]:
        words = table.columns[name].values
        split = split_codes(words, f"'{source.path}': split column '{name}'", table.where, problems)
    refuse(problems, source)
    return FileSet(
        name=str(source),
        x=torch.arange(table.num_rows),
        y=labels.y,
        split=split,
        client=codes,
        client_names=names,
        classes=labels.classes,
        num_classes=labels.num_classes,
        task=labels.task,
        form="vectors",
        finish=TableInputs(tuple(inputs), options.standardize),
        notes=(labels.note(f"target {', '.join(column.name for column in targets)}"),),
        content=[part for column in inputs for part in (column.name, _content(column))],
    )


def _content(column: Column) -> Tensor | str:
    return "\0".join(column.values.tolist()) if column.kind == "text" else torch.from_numpy(column.values)


def _named(table: Table, options: FileOptions, problems: list[str]) -> dict[str, list[str]]:
    """The columns that the options name, by field; one that is not there is refused with the nearest that is."""
    if options.target is None:
        problems.append(f"a table needs --target COL; the columns of '{table.path}': {listed(list(table.columns), 12)}")
    targets = [part.strip() for part in (options.target or "").split(",") if part.strip()]
    fields = {
        "data.target": targets if options.target not in table.columns else [str(options.target)],
        "data.client": [options.client] if options.client else [],
        "data.split": [options.split] if options.split else [],
        "data.features": list(options.features),
        "data.categories": list(options.categories),
    }
    uses: dict[str, str] = {}
    for field, names in fields.items():
        for name in names:
            if name not in table.columns:
                problems.append(str(unknown(f"{field}: column", name, table.columns)))
            elif field != "data.categories" and name in uses:
                problems.append(f"column '{name}' is given for {uses[name]} and for {field}; it can be one of them")
            elif field != "data.categories":
                uses[name] = field
    return fields


def _input(table: Table, column: Column, options: FileOptions, problems: list[str]) -> Column:
    """A column as an input; problems with it are noted."""
    if column.name in options.categories and column.kind != "text":
        there = ~np.isnan(column.values)
        texts = [name_of(value) if known else "" for value, known in zip(column.values, there, strict=True)]
        column = Column(column.name, "text", np.array(texts, dtype=object))
    if column.kind == "text":
        _check_categories(table, column, problems)
        return column
    endless = np.flatnonzero(np.isinf(column.values))
    if len(endless):
        problems.append(f"'{table.path}', {table.where(int(endless[0]))}: column '{column.name}' is not finite")
    if len(column.missing) and options.missing == "refuse":
        first = int(column.missing[0])
        more = f" ({len(column.missing)} such rows)" if len(column.missing) > 1 else ""
        problems.append(
            f"'{table.path}', {table.where(first)}: column '{column.name}' has no number{more}; fill it in, or take "
            "the mean with --set data.missing=mean"
        )
    return column


def _check_categories(table: Table, column: Column, problems: list[str]) -> None:
    values = np.unique(column.values)
    if len(values) <= MOST_CATEGORIES:
        return
    shown = str(values[0] or values[1])[:40]
    advice = "turn it into numbers, such as days" if _DATE.match(shown) else "group its values"
    problems.append(
        f"'{table.path}': column '{column.name}' has {len(values)} different texts, such as '{shown}', too many for "
        f"categories; {advice}, or leave it out by naming the others in data.features"
    )


def _labels(table: Table, columns: Sequence[Column], task: str | None, problems: list[str]) -> Labels:
    """Text and whole numbers are classes, other numbers are to be met; several columns are always numbers."""
    empty = [(column, int(column.missing[0])) for column in columns if len(column.missing)]
    for column, row in empty[:MOST]:
        problems.append(
            f"'{table.path}', {table.where(row)}: the target '{column.name}' is missing; fill it in or remove the row"
        )
    what = f"'{table.path}': target '{', '.join(column.name for column in columns)}'"
    texts = [column.name for column in columns if column.kind == "text"]
    numbers = len(columns) > 1 or task in ("regression", "multilabel") or columns[0].kind == "number"
    if texts and numbers:
        raise ConfigError(f"{what}: column '{texts[0]}' has texts; several targets, and quantities, must be numbers")
    if empty:
        return Labels(torch.zeros(0), "", 0)
    if not numbers or (task == "classification" and len(columns) == 1):
        return class_labels(columns[0].values, what)
    values = columns[0].values if len(columns) == 1 else np.stack([column.values for column in columns], 1)
    return number_labels(values[:, None] if task == "multilabel" and values.ndim == 1 else values, task, what)


def _clients(table: Table, names: list[str], problems: list[str]) -> tuple[Tensor | None, tuple[str, ...]]:
    if not names:
        return None, ()
    column = table.columns[names[0]]
    for row in column.missing[:1].tolist():
        problems.append(f"'{table.path}', {table.where(row)}: column '{column.name}' names no client; fill it in")
    return client_codes(column.values)
