"""How files are written: whole or not at all, under names that every system takes, with one error for a full disk.

A run's folder may come from somebody else, so no link in it is followed: it would lead the writing, or the reading, to
any other file of the user's.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fednorm.errors import CheckpointError, ConfigError, DiskError, first_line

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
MOST_TEXT = 256 << 20
"""Bytes of a JSON or TOML file that are read: one of a run with a million clients is smaller."""
_MOST_DEEP = 100
_NO_PLACE = {
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENOENT,
    errno.ENAMETOOLONG,
    errno.ELOOP,
}


def safe_name(text: str) -> str:
    """A method's expression, or any other text, as a file name.

    >>> safe_name("fedprox(mu=0.01)+gn")
    'fedprox_mu=0.01_gn'
    """
    return re.sub(r"[^A-Za-z0-9.=-]+", "_", text).strip("_")


def draft_of(path: Path) -> Path:
    """Where a file is written before it takes its place."""
    return path.with_name(path.name + ".part")


def free_bytes(path: Path) -> str:
    """How much its disk has left, for an error."""
    there = next((each for each in (path, *path.parents) if each.exists()), Path())
    return f"{shutil.disk_usage(there).free:,} bytes are free"


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full or refusing disk into one line and exit code 5, and a place that cannot be into exit code 2.

    Only the writing belongs inside: whatever else fails there would be blamed on this file.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            full = f" ({free_bytes(path)})" if error.errno == errno.ENOSPC else ""
            advice = "choose another place" if error.errno == errno.EROFS else "free some space and resume"
            raise DiskError(f"'{path}' cannot be written: {error.strerror}{full}; {advice}") from error
        if error.errno in _NO_PLACE:
            raise ConfigError(f"'{path}' cannot be written: {error.strerror}; choose another place") from None
        raise


def make_writable(folder: Path) -> None:
    """Make a folder and write into it once, so that nothing of hours ends where it cannot be kept."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def refuse_links(*paths: Path) -> None:
    """Refuse links where a run has its own files and folders, and whatever else is no plain file or folder."""
    for path in paths:
        with suppress(OSError):  # what is not there, or not to be seen, is nobody's trap
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                what = "a link, which fednorm does not follow here" if stat.S_ISLNK(mode) else "no plain file"
                raise CheckpointError(f"'{path}' is {what}; put the file itself in its place, or remove it")


def open_plain(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a file of a run's folder for `os.read` and the like: a link or a pipe in its place is refused."""
    refuse_links(path)  # with the better text; what follows holds also where somebody changes it in between
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    return handle


def read_bounded(path: Path, *, foreign: bool = True) -> bytes:
    """A text file's bytes, of which there may not be absurdly many; links are followed only where the user's own."""
    handle = open_plain(path) if foreign else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        data = file.read(MOST_TEXT + 1)
    if len(data) > MOST_TEXT:
        raise CheckpointError(f"'{path}' has more than {MOST_TEXT:,} bytes, which no such file has; give another")
    return data


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Write a file whole or not at all: yields its draft, which takes its place once it is on the disk."""
    draft = draft_of(path)
    with disk_errors(path):
        try:
            draft.unlink(missing_ok=True)  # left behind by a kill, or laid there to lead the writing elsewhere
            os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
            yield draft
            with draft.open("rb") as file:
                os.fsync(file.fileno())  # a name that arrives before its bytes is an empty file after a power cut
            os.replace(draft, path)
        except BaseException:
            draft.unlink(missing_ok=True)  # on a full disk its bytes are needed
            raise


def json_text(value: Any, indent: int | None = None) -> str:
    """A value as JSON, in which numbers that are not finite are null: JSON has no word for them.

    >>> json_text({"loss": float("nan"), "scores": [1.5, float("inf")]})
    '{"loss": null, "scores": [1.5, null]}'
    """
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except (TypeError, ValueError):  # some are not, which a look at each of them would find out more slowly
        return json.dumps(finite(value)[0], indent=indent, allow_nan=False)


def finite(value: Any) -> tuple[Any, dict[str, str]]:
    """A value with None for every number that is not finite, and what those were by their place.

    Places are written as JSON pointers: `/eval/pooled/loss`.

    >>> finite({"a": [float("-inf"), 2]})
    ({'a': [None, 2]}, {'/a/0': '-inf'})
    """
    found: dict[str, str] = {}

    def clean(each: Any, place: str) -> Any:
        if isinstance(each, float) and not math.isfinite(each):
            found[place] = str(each)
            return None
        if isinstance(each, Mapping):
            return {key: clean(inner, f"{place}/{_escaped(key)}") for key, inner in each.items()}
        if isinstance(each, list | tuple):
            return [clean(inner, f"{place}/{number}") for number, inner in enumerate(each)]
        return each

    return clean(value, ""), found


def _escaped(key: object) -> str:
    return str(key).replace("~", "~0").replace("/", "~1")


def infinite_again(value: Any, words: Mapping[str, str]) -> Any:
    """What `finite` took out, put back into a value that was read from JSON.

    >>> infinite_again({"a": [None, 2]}, {"/a/0": "-inf"})
    {'a': [-inf, 2]}
    """

    def restored(each: Any, place: str) -> Any:
        if place in words:
            return float(words[place])
        if isinstance(each, Mapping):
            return {key: restored(inner, f"{place}/{_escaped(key)}") for key, inner in each.items()}
        if isinstance(each, list):
            return [restored(inner, f"{place}/{number}") for number, inner in enumerate(each)]
        return each

    return restored(value, "") if words else value


def write_json(path: Path, value: Any, indent: int = 2) -> None:
    """Write a JSON file whole or not at all."""
    with written_whole(path) as draft:
        draft.write_text(json_text(value, indent) + "\n", encoding="utf-8")


def refuse_depth(value: Any) -> Any:
    """The value itself, or a `RecursionError` where its tables and lists lie deeper in each other than in any file."""
    level, depth = [value], 0
    while level := [
        inner
        for each in level
        for inner in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
        if isinstance(inner, dict | list)
    ]:
        depth += 1
        if depth > _MOST_DEEP:
            raise RecursionError
    return value


def read_json(path: Path, fix: str = "start the run anew") -> Any:
    """Read a JSON file that belongs to a run; `fix` is what to do where it is damaged."""
    try:
        return refuse_depth(json.loads(read_bounded(path)))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"'{path.parent}' is not the folder of a run: it has no {path.name}") from None
    except OSError as error:
        raise CheckpointError(f"'{path}' cannot be read: {error.strerror}; give a folder that you may read") from None
    except RecursionError:
        raise CheckpointError(f"'{path}' is damaged (nested too deeply); {fix}") from None
    except ValueError as error:  # no JSON, no UTF-8, or a number of thousands of digits
        raise CheckpointError(f"'{path}' is damaged ({first_line(error)}); {fix}") from None
