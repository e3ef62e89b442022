"""A table out of a CSV or Parquet file: named columns, each of numbers or of texts."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fednorm.data.bounds import refuse_above
from fednorm.data.from_files.problems import MOST, refuse
from fednorm.errors import ConfigError, first_line, require

MISSING = frozenset({"", "na", "n/a", "nan", "null", "none"})
"""Words for a number that is not there."""
LONGEST_NUMBER = 64
"""A cell with more characters is no number."""
DELIMITERS = (",", ";", "\t")
Kind = Literal["whole", "number", "text"]


@dataclass(frozen=True)
class Column:
    """One column: float64 with NaN where nothing is, or texts; `whole` are numbers written without a point."""

    name: str
    kind: Kind
    values: np.ndarray

    @property
    def missing(self) -> np.ndarray:
        """The rows where nothing is."""
        return np.flatnonzero(self.values == "" if self.kind == "text" else np.isnan(self.values))


@dataclass(frozen=True)
class Table:
    """Columns by name, and where each row lies in the file."""

    path: Path
    columns: dict[str, Column]
    lines: Sequence[int] | None
    """lines of a text file; None where rows are only counted"""

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.columns.values())).values)

    def where(self, row: int) -> str:
        """The place of a row, for an error."""
        return f"row {row}" if self.lines is None else f"line {self.lines[row]}"


def read_table_file(path: Path, source: object) -> Table:
    """Read a whole table; the form follows from the file's first bytes, not from its name."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except FileNotFoundError:
        raise ConfigError(f"'{path}' does not exist; give a CSV or Parquet file") from None
    except IsADirectoryError:
        raise ConfigError(f"'{path}' is a folder; give a CSV or Parquet file, or folder:DIR for images") from None
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be read: {error.strerror}; give a CSV or Parquet file") from None
    table = read_parquet(path) if magic == b"PAR1" else read_csv(path, source)
    if not table.columns or not table.num_rows:
        raise ConfigError(f"'{path}' has no rows; give a table with a line of names and rows below it")
    return table


def read_csv(path: Path, source: object) -> Table:
    """A text file with a line of names; commas, semicolons or tabs between them, quotes as spreadsheets write them."""
    problems: list[str] = []
    rows: list[list[str]] = []
    lines: list[int] = []
    try:
        # The mark that some programs put at the beginning of a text is no part of the first name.
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=_delimiter(file.readline()), strict=True)
            file.seek(0)
            names = next(reader, [])
            _check_names([name.strip() for name in names], path, problems)
            for row in reader:
                if len(row) == len(names):
                    rows.append(row)
                    lines.append(reader.line_num)
                elif row and len(problems) < MOST:
                    problems.append(
                        f"'{path}', line {reader.line_num}: {len(row)} cells, but the first line has {len(names)} names"
                    )
    except UnicodeDecodeError as error:
        raise ConfigError(f"'{path}' is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except csv.Error as error:
        raise ConfigError(f"'{path}' is not a readable CSV file ({first_line(error)}); save it again as CSV") from None
    refuse(problems, source)
    columns = (column_of(name.strip(), cells) for name, cells in zip(names, zip(*rows, strict=True), strict=bool(rows)))
    return Table(path, {column.name: column for column in columns}, lines)


def _delimiter(header: str) -> str:
    """The one that the first line has most of."""
    return max(DELIMITERS, key=header.count)


def _check_names(names: Sequence[str], path: Path, problems: list[str]) -> None:
    for number, name in enumerate(names, 1):
        if not name:
            problems.append(f"'{path}': column {number} has no name; give it one in the first line")
        elif name in names[: number - 1]:
            problems.append(f"'{path}' has two columns '{name}'; rename one")


def column_of(name: str, cells: Sequence[str]) -> Column:
    """A column of texts, or of numbers where every cell that is not missing is one.

    >>> column_of("a", ["1", "", "2"]).kind, column_of("a", ["1", "2.5"]).kind, column_of("a", ["1", "x"]).kind
    ('whole', 'number', 'text')
    """
    stripped = [cell.strip() for cell in cells]
    # As objects: numpy's own texts all take the room of the longest.
    as_text = Column(name, "text", np.array(stripped, dtype=object))
    if max(map(len, stripped), default=0) > LONGEST_NUMBER:
        return as_text
    texts = np.array(stripped, dtype=np.str_)
    missing = np.isin(np.char.lower(texts), list(MISSING))
    there = texts[~missing]
    try:
        found = there.astype(np.float64)
    except ValueError:
        found = np.empty(0)
    if not len(found):
        return as_text
    numbers = np.full(len(texts), np.nan)
    numbers[~missing] = found
    whole = bool(np.char.isdigit(np.char.lstrip(there, "+-")).all())
    return Column(name, "whole" if whole else "number", numbers)


def read_parquet(path: Path) -> Table:
    """A Parquet file: numbers, texts and truth values; other types are refused by name when they are used."""
    require("pyarrow", "table", "reading a Parquet file")
    import pyarrow.parquet as parquet

    try:
        # One file, whatever the folders around it are called.
        file = parquet.ParquetFile(str(path))
        # What repeats takes no room in the file: a row may be a bit there and is eight bytes a cell here, or more.
        refuse_above(path, 8 * file.metadata.num_rows * file.metadata.num_columns, path.stat().st_size)
        stored = file.read()
        problems: list[str] = []
        _check_names(stored.column_names, path, problems)
        refuse(problems, f"table:{path}")
        columns = {
            name: _parquet_column(name, column)
            for name, column in zip(stored.column_names, stored.columns, strict=True)
        }
    except ConfigError:
        raise
    except Exception as error:  # whatever pyarrow makes of damaged bytes, some of it when texts are taken out
        raise ConfigError(f"'{path}' is not a readable Parquet file ({first_line(error)}); write it again") from None
    return Table(path, columns, None)


def _parquet_column(name: str, column: Any) -> Column:
    from pyarrow import types

    kind = column.type
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        numbers = np.array([np.nan if each is None else float(each) for each in column.to_pylist()])
        return Column(name, "whole" if types.is_integer(kind) else "number", numbers)
    texts = ["" if each is None else str(each) for each in column.to_pylist()]
    return Column(name, "text", np.array(texts, dtype=object))
