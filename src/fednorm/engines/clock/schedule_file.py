"""A schedule in a file: how long each client takes on average, as JSON, TOML or CSV.

JSON and TOML hold a table `clients` with one table a client; CSV has a column `client`. Each has `download`, `compute`
and `upload`, and may have `around`: `exponential`, as training is drawn unless it says `fixed`. The client `*` stands
for all that are not named.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from fednorm.errors import ConfigError, first_line, unknown
from fednorm.files import read_bounded, refuse_depth

FILE = "file:"
REST = "*"
PARTS = ("download", "compute", "upload")
LONGEST = 1e12
"""of a part of a job: times are added up, and stay exact enough to tell events apart"""
_FORMS = (".json", ".toml", ".csv")


@dataclass(frozen=True)
class Row:
    """Mean times of one client's jobs."""

    download: float
    compute: float
    upload: float
    around: Literal["fixed", "exponential"] = "exponential"
    """how the times of training lie around their mean"""


def absolute(times: str) -> str:
    """What names a file of times names it from any folder, as a run that goes on must.

    >>> absolute("file:/data/../times.csv"), absolute("equal(time=2)")
    ('file:/times.csv', 'equal(time=2)')
    """
    path = times.removeprefix(FILE)
    # Not resolved: a link that is moved to other times is still the path the user gave.
    return FILE + os.path.abspath(os.path.expanduser(path)) if path and path != times else times


def read_rows(path: Path, count: int, names: Sequence[str] = ()) -> tuple[Row, ...]:
    """The means of every client, in the order of their ids; a file that names others, or not all, is refused."""
    rows: dict[int | str, Row] = {}
    for client, told in _tables(path):
        where: int | str = REST if client == REST else _number(path, client, count, names)
        if where in rows:
            raise ConfigError(f"schedule '{path}' has client {client} twice; keep one")
        rows[where] = _row(path, client, told)
    lacking = [client for client in range(count) if client not in rows]
    if lacking and REST not in rows:
        raise ConfigError(
            f"schedule '{path}' has no times for client {lacking[0]}, one of {len(lacking)}; "
            f"add them, or a client '{REST}' for all that are not named"
        )
    return tuple(rows[client] if client in rows else rows[REST] for client in range(count))


def _number(path: Path, client: str, count: int, names: Sequence[str]) -> int:
    if client in names:
        return list(names).index(client)
    if client.isdecimal() and int(client) < count:
        return int(client)
    known = f"clients 0 to {count - 1}" + (f", {names[0]} to {names[-1]}" if names else "")
    raise ConfigError(f"schedule '{path}' names client '{client}', which the run does not have; it has {known}")


def _row(path: Path, client: str, told: Mapping[str, Any]) -> Row:
    for key in told:
        if key not in (*PARTS, "around"):
            raise unknown(f"field of schedule '{path}'", key, (*PARTS, "around"))
    around = told.get("around") or "exponential"
    if around not in ("fixed", "exponential"):
        raise ConfigError(f"schedule '{path}', client {client}: around={around!r} is neither exponential nor fixed")
    return Row(*(_time(path, client, part, told.get(part, 0.0)) for part in PARTS), around=around)


def _time(path: Path, client: str, part: str, value: Any) -> float:
    try:
        time = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        time = math.nan
    if not 0 <= time <= LONGEST:  # also refuses NaN
        raise ConfigError(
            f"schedule '{path}', client {client}: {part}={value} is out of range; give 0 up to {LONGEST:g}"
        )
    return time


def _tables(path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """Each client with what the file says of it."""
    kind = path.suffix.lower()
    if kind not in _FORMS:
        raise ConfigError(f"schedule '{path}' is none of {', '.join(_FORMS)}; give a file of one of these kinds")
    try:
        text = read_bounded(path, foreign=False).decode("utf-8-sig")
        if kind == ".csv":
            return _csv(path, text)
        whole = refuse_depth(json.loads(text, object_pairs_hook=_once) if kind == ".json" else tomllib.loads(text))
    except FileNotFoundError:
        raise ConfigError(f"schedule '{path}' does not exist; give a JSON, TOML or CSV file with times") from None
    except OSError as error:
        raise ConfigError(f"schedule '{path}' cannot be read: {error.strerror}; give another file") from None
    except RecursionError:
        raise ConfigError(f"schedule '{path}' cannot be read: nested too deeply") from None
    except (ValueError, csv.Error) as error:
        raise ConfigError(f"schedule '{path}' cannot be read: {first_line(error)}; mend the file there") from None
    clients = whole.get("clients") if isinstance(whole, dict) else None
    if not isinstance(clients, dict) or not all(isinstance(each, dict) for each in clients.values()):
        raise ConfigError(
            f"schedule '{path}' has no table of clients; write clients, and below each its {', '.join(PARTS)}"
        )
    for key in cast("dict[str, Any]", whole):
        if key != "clients":  # what stands beside them would be no client's
            raise ConfigError(
                f"schedule '{path}' has '{key}' beside its clients; put it below each of them, or '{REST}'"
            )
    return list(cast("dict[str, Mapping[str, Any]]", clients).items())


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A table of JSON, which may name nothing twice, as in TOML: the first of both would be lost without a word."""
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"it has '{key}' twice; keep one")
        table[key] = value
    return table


def _csv(path: Path, text: str) -> list[tuple[str, Mapping[str, Any]]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    columns = list(reader.fieldnames or ())
    if "client" not in columns:
        raise ConfigError(f"schedule '{path}' has no column client; write client,{','.join(PARTS)} in its first line")
    twice = next((column for column in columns if columns.count(column) > 1), None)
    if twice is not None:
        raise ConfigError(f"schedule '{path}' has column '{twice}' twice; keep one")
    found: list[tuple[str, Mapping[str, Any]]] = []
    for line in reader:
        if None in line or None in line.values():
            raise ConfigError(f"schedule '{path}', line {reader.line_num}: it has not as many columns as the first")
        client = str(line.pop("client")).strip()
        found.append((client, {str(key): value for key, value in line.items()}))
    return found
