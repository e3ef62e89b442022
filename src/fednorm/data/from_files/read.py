"""Read users' files by name; what was read last is kept, since a comparison asks for it again and again."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from fednorm.data.from_files.file_set import FileOptions, FileSet
from fednorm.data.from_files.folder import read_folder
from fednorm.data.from_files.npz import read_npz
from fednorm.data.from_files.source import Source, stamp_of
from fednorm.data.from_files.table import read_table
from fednorm.errors import ConfigError, FednormError, first_line

READERS: dict[str, Callable[[Source, FileOptions], FileSet]] = {
    "folder": read_folder,
    "table": read_table,
    "npz": read_npz,
}


def read(source: Source, options: FileOptions) -> FileSet:
    """All that the files hold; read anew only after a change on the disk."""
    return _read(source, options, stamp_of(source.path))


@lru_cache(maxsize=1)
def _read(source: Source, options: FileOptions, stamp: str) -> FileSet:
    try:
        return READERS[source.kind](source, options)
    except FednormError:
        raise
    except MemoryError:
        raise ConfigError(f"'{source}' does not fit into memory; take less of it, or a larger machine") from None
    except Exception as error:  # files may be anybody's: whatever a reader stumbles over is one line
        raise ConfigError(f"'{source}' cannot be read ({type(error).__name__}: {first_line(error)})") from error
