"""Names of data that lie in users' own files: `folder:DIR`, `table:FILE`, `npz:FILE`. Imports nothing heavy."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fednorm.errors import ConfigError

KINDS = {"folder": "DIR", "table": "FILE", "npz": "FILE"}
NAMES = "folder:DIR, table:FILE or npz:FILE"


@dataclass(frozen=True)
class Source:
    """Where data lie, and in which form."""

    kind: str
    path: Path

    def __str__(self) -> str:
        return f"{self.kind}:{self.path}"


def find_source(name: str) -> Source | None:
    """The files that a data set's name means, with an absolute path; None for a set that is known by its name.

    >>> str(find_source("table:/data/../data/a.csv")), find_source("cifar10")
    ('table:/data/a.csv', None)
    """
    kind, colon, path = name.partition(":")
    if not colon or kind not in KINDS:
        return None
    if not path:
        raise ConfigError(f"'{name}' has no path; write {kind}:{KINDS[kind]}")
    # Not resolved: a link that is moved to newer data is still the path the user gave.
    return Source(kind, Path(os.path.abspath(os.path.expanduser(path))))


def stamp_of(path: Path) -> str:
    """Changes whenever a file of this path is written, added or removed; reads no file."""
    found = hashlib.blake2b(digest_size=16)
    for line in sorted(_stamps(path)):
        found.update(line.encode(errors="surrogateescape"))
    return found.hexdigest()


def _stamps(path: Path) -> Iterator[str]:
    files = [path]
    if path.is_dir():
        files = [Path(folder, file) for folder, _, names in os.walk(path) for file in names]
    for file in files:
        if file.exists():
            about = file.stat()
            yield f"{file}\0{about.st_mtime_ns}\0{about.st_size}\n"
