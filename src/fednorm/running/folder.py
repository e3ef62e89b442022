"""A run's folder: readable by eye, safe against a kill at any moment, owned by one process at a time.

config.json  what was asked      env.json      where and with what it ran
metrics.jsonl one row a round    result.json   what came out (written at the end)
model.safetensors the final global model       state.sqlite  what `fednorm resume` continues from
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from fednorm.errors import CheckpointError, ConfigError, DiskError, LockedError


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole or not at all."""
    draft = path.with_name(path.name + ".part")
    with disk_errors(path):
        draft.write_text(json.dumps(value, indent=2) + "\n")
        os.replace(draft, path)


def read_json(path: Path) -> Any:
    """Read a JSON file that belongs to a run."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"'{path.parent}' is not the folder of a run: it has no {path.name}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"'{path}' is damaged ({error}); start the run anew") from None


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full or refusing disk into one line and exit code 5."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
            raise DiskError(f"'{path}' cannot be written: {error.strerror}; free some space and resume") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.ENAMETOOLONG):
            raise ConfigError(
                f"'{path}' cannot be written: {error.strerror}; choose another folder with --out"
            ) from None
        raise


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
    def state(self) -> Path:
        return self.path / "state.sqlite"

    def create(self, config: Mapping[str, Any]) -> None:
        """Make the folder with its config and environment; an existing run is never overwritten."""
        if self.config.exists():
            raise ConfigError(
                f"'{self.path}' holds a run already; choose another --out, or `fednorm resume {self.path}`"
            )
        with disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / "env.json", environment())
        write_json(self.config, config)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder; a lock dies with its process, so nothing stale is left behind."""
        with disk_errors(self.path), (self.path / ".lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                owner = file.read().strip() or "unknown"
                raise LockedError(
                    f"'{self.path}' is in use by process {owner}; wait for it or choose another folder"
                ) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    def rewrite_metrics(self, rows: Iterable[Mapping[str, Any]]) -> TextIO:
        """Bring metrics.jsonl to exactly the committed rows and return it open for more."""
        draft = self.metrics.with_name("metrics.jsonl.part")
        with disk_errors(self.metrics):
            with draft.open("w") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
            os.replace(draft, self.metrics)
            return self.metrics.open("a", buffering=1)


def environment() -> dict[str, Any]:
    """Versions, hardware and commit, so that a number can be traced to what made it."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "fednorm": metadata.version("fednorm") if _installed("fednorm") else "source",
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "command": " ".join(sys.argv),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _commit() -> str | None:
    """The commit of the source tree, where fednorm runs from one."""
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(  # noqa: S603
            ["git", "-C", str(here), "rev-parse", "--short", "HEAD"],  # noqa: S607
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def fresh_folder(root: Path, name: str) -> Path:
    """A folder name that is not taken: runs/NAME-DATE, with a number if needed."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    path = root / f"{name}-{stamp}"
    number = 1
    while path.exists():
        number += 1
        path = root / f"{name}-{stamp}-{number}"
    return path
