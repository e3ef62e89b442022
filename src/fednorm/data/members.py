"""Arrays in a numpy archive, looked at before they are read: what headers promise must be there, and be numbers."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Collection
from pathlib import Path

import numpy as np

from fednorm.data.bounds import refuse_above
from fednorm.errors import ConfigError


def check_members(archive: zipfile.ZipFile, path: Path, wanted: Collection[str] | None = None) -> list[str]:
    """Refuse an archive that lies about its size or is too large for its file; the names of all arrays in it."""
    found = {Path(info.filename).stem: info for info in archive.infolist() if info.filename.endswith(".npy")}
    names = [name for name in found if wanted is None or name in wanted]
    refuse_above(path, sum(found[name].file_size for name in names), path.stat().st_size)
    for name in names:
        _check_member(archive, found[name], f"'{path}': {name}")
    return list(found)


def _check_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, what: str) -> None:
    """Refuse an array whose header promises another size than the archive has for it, or that holds Python objects."""
    with archive.open(info) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        header = file.tell()
    if dtype.hasobject:
        raise ConfigError(f"{what} holds Python objects, which are never read; save numbers, or text as dtype 'U'")
    size = math.prod(shape) * dtype.itemsize
    if size != info.file_size - header or any(length < 0 for length in shape):
        raise ConfigError(f"{what} says it has {size:,} bytes, which its file does not hold; save it again")
