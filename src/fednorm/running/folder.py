"""A run's folder: readable by eye, safe against a kill at any moment, owned by one process at a time.

config.json  what was asked      env.json      where and with what it ran
metrics.jsonl one row a round    result.json   what came out (written at the end)
model.safetensors the final global model       state.sqlite  what `fednorm resume` continues from
best.safetensors, round-N.safetensors          with --keep best, --keep-every
"""

from __future__ import annotations

import fcntl
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from fednorm.errors import ConfigError, LockedError
from fednorm.files import disk_errors, json_text, open_plain, safe_name, write_json, written_whole
from fednorm.running.environment import environment
from fednorm.running.records import RoundRow, as_written
from fednorm.running.sealed import sealed


class RunFolder:
    """The folder of one run, or of a comparison with one folder a run inside."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def model(self) -> Path:
        return self.path / "model.safetensors"

    @property
    def best(self) -> Path:
        return self.path / "best.safetensors"

    @property
    def state(self) -> Path:
        return self.path / "state.sqlite"

    @property
    def has_begun(self) -> bool:
        """Whether the run has state: rows are written only after its first commit."""
        return self.metrics.exists()

    def refuse_place(self) -> None:
        """Refuse a place where no new run can be, without writing anything."""
        if self.config.exists():
            raise ConfigError(
                f"'{self.path}' holds a run already; choose another --out, or `fednorm resume {self.path}`"
            )
        there = next(path for path in (self.path.absolute(), *self.path.absolute().parents) if os.path.lexists(path))
        if not there.is_dir():
            raise ConfigError(f"'{self.path}' cannot be a folder: '{there}' is a file; choose another place")
        if not os.access(there, os.W_OK | os.X_OK):
            raise ConfigError(f"'{self.path}' cannot be written: '{there}' is not yours to write; choose another place")

    def create(self, config: Mapping[str, Any]) -> None:
        """Make the folder with its config and environment; an existing run is never overwritten."""
        self.refuse_place()
        with disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / "env.json", environment())
        write_json(self.config, sealed(config))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder; a lock dies with its process, so nothing stale is left behind."""
        with disk_errors(self.path):
            file = os.fdopen(open_plain(self.path / ".lock", os.O_RDWR | os.O_CREAT), "r+")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                owner = file.read().strip() or "unknown"
                raise LockedError(
                    f"'{self.path}' is in use by process {owner}; wait for it or choose another folder"
                ) from None
            with disk_errors(self.path):
                file.truncate(0)
                file.write(str(os.getpid()))
                file.flush()
            yield

    @contextmanager
    def metrics_open(self, rows: Iterable[RoundRow]) -> Iterator[Callable[[RoundRow], None]]:
        """Bring metrics.jsonl to exactly the committed rows; yields what adds one more."""
        path = self.metrics
        with written_whole(path) as draft, draft.open("w") as file:
            file.writelines(_line(row) for row in rows)
        with disk_errors(path):
            # Without a buffer: a line that did not fit would be tried again, and fail again, when the file is closed.
            file = os.fdopen(open_plain(path, os.O_WRONLY | os.O_APPEND), "ab", buffering=0)

        def add(row: RoundRow) -> None:
            with disk_errors(path):
                _write_all(file, _line(row).encode())

        with file:
            yield add


def _line(row: RoundRow) -> str:
    try:
        return json.dumps(row, allow_nan=False) + "\n"
    except ValueError:  # it has numbers that are not finite; to look for them in every row would take longer
        return json_text(as_written(row)) + "\n"


def _write_all(file: io.RawIOBase, line: bytes) -> None:
    """Write a line that the system may take in pieces: of a disk that is almost full, the last bytes only."""
    left = memoryview(line)
    while left:
        left = left[file.write(left) :]


def fresh_folder(root: Path, name: str) -> Path:
    """A folder name that is not taken: runs/NAME-DATE, with a number if needed."""
    stamped = f"{safe_name(name)}-{datetime.now():%Y%m%d-%H%M%S}"
    path = root / stamped
    number = 1
    while path.exists():
        number += 1
        path = root / f"{stamped}-{number}"
    return path
