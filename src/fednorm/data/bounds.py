"""How much a file of data may become: a small one that unpacks to gigabytes is refused before it takes the memory."""

from __future__ import annotations

import bz2
import lzma
import math
import os
import zlib
from pathlib import Path
from typing import Protocol

from fednorm.errors import ConfigError

ANY = 256 << 20
"""Bytes that every file may become."""
FACTOR = 100
"""Bytes that each byte of a larger one may stand for; images, labels and tables stay below a third of that."""
VARIABLE = "FEDNORM_MAX_GB"
_DICTIONARY = 256 << 20
"""Memory that an xz file may ask for before its first byte; `xz -9` takes 65 MiB."""


def most_bytes(packed: int) -> int:
    """Bytes that a file of so many may become; the environment variable FEDNORM_MAX_GB says otherwise for all.

    >>> most_bytes(1_000), most_bytes(10_000_000)
    (268435456, 1000000000)
    """
    text = os.environ.get(VARIABLE, "")
    if not text:
        return max(ANY, FACTOR * packed)
    try:
        gigabytes = float(text)
    except ValueError:
        gigabytes = math.nan
    if not 0 < gigabytes < 1e9:
        raise ConfigError(f"{VARIABLE}='{text}' is no number of gigabytes; give one such as 8")
    return int(gigabytes * 1e9)


def refuse_above(path: Path, size: int, packed: int) -> None:
    """Refuse what would become more than its file may; `size` may be the first byte too many."""
    if size > most_bytes(packed):
        raise too_large(path, packed)


def too_large(path: Path, packed: int) -> ConfigError:
    """The error for a file of so many bytes that would become more than it may."""
    return ConfigError(
        f"'{path}' has {packed:,} bytes and would become more than {most_bytes(packed):,}, which data do not; "
        f"if you trust it, set {VARIABLE} to the gigabytes it may take"
    )


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


def unpacked(path: Path) -> bytes:
    """The content of a .gz, .bz2 or .xz file, as large as it may be at most; an `EOFError` where its end is missing.

    Damaged ones raise what their library does: `zlib.error`, `OSError`, `lzma.LZMAError`.
    """
    data = path.read_bytes()
    packed, most = len(data), most_bytes(len(data))
    parts: list[bytes] = []
    while data:
        stream = _decompressor(path.suffix)
        # One byte more than allowed, so that a file of exactly that size passes.
        parts.append(stream.decompress(data, most + 1))
        most -= len(parts[-1])
        if most < 0:
            refuse_above(path, most_bytes(packed) + 1, packed)
        if not stream.eof:
            raise EOFError("its end is missing")
        data = stream.unused_data.lstrip(b"\0")  # several may stand in a row, and zeros fill the last block
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _decompressor(suffix: str) -> _Decompressor:
    if suffix == ".xz":
        return lzma.LZMADecompressor(memlimit=_DICTIONARY)
    if suffix == ".bz2":
        return bz2.BZ2Decompressor()
    return zlib.decompressobj(zlib.MAX_WBITS | 16)
