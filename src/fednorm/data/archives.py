"""Archives put in place: nothing outside their folder, no links, no neighbour replaced, no bombs."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import stat
import tarfile
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

from fednorm.data.bounds import refuse_above
from fednorm.errors import ConfigError

_BLOCK = 1 << 18
_ELSEWHERE = "take it from its home again, or unpack it by hand"
_DAMAGED = (
    *(tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error),
    *(EOFError, NotImplementedError, RuntimeError, ValueError),
)


def unpack(archive: Path, brings: str = "") -> list[Path]:
    """Unpack a tar or zip beside itself; each entry of its top level appears complete or not at all.

    What lies there already stays: an archive may replace nothing but the folder that it `brings`.
    """
    with tempfile.TemporaryDirectory(dir=archive.parent, prefix=".unpack-") as temporary:
        room = Path(temporary)
        try:
            if zipfile.is_zipfile(archive):
                _unpack_zip(archive, room)
            else:
                _unpack_tar(archive, room)
        except _DAMAGED as error:
            raise ConfigError(f"{archive} cannot be unpacked ({error}); delete it and fetch it again") from error
        entries = sorted(room.iterdir())
        for entry in entries:
            if entry.name != brings and os.path.lexists(archive.parent / entry.name):
                raise ConfigError(
                    f"{archive} holds '{entry.name}', and {archive.parent / entry.name} is there already; "
                    "move that away and fetch again"
                )
        return [_placed(entry, archive.parent / entry.name) for entry in entries]


def _placed(entry: Path, target: Path) -> Path:
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    os.replace(entry, target)
    return target


def _unpack_zip(archive: Path, room: Path) -> None:
    with zipfile.ZipFile(archive) as file:
        members = file.infolist()
        refuse_above(archive, sum(member.file_size for member in members), archive.stat().st_size)
        for member in members:
            if stat.S_ISLNK(member.external_attr >> 16):
                raise ConfigError(f"{archive} holds a link, '{member.filename}', which is not unpacked; {_ELSEWHERE}")
        file.extractall(room)  # noqa: S202 (zipfile removes .. and absolute paths itself)


def _unpack_tar(archive: Path, room: Path) -> None:
    def checked(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        if member.islnk() or member.issym():
            raise ConfigError(f"{archive} holds a link, '{member.name}', which is not unpacked; {_ELSEWHERE}")
        return tarfile.data_filter(member, path)

    with archive.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    with (
        gzip.open(archive) if zipped else archive.open("rb") as inner,
        io.BufferedReader(_Bounded(inner, archive), _BLOCK) as stream,
        tarfile.open(fileobj=stream, mode="r|") as tar,  # in one go: nothing is read, or counted, twice
    ):
        tar.extractall(room, filter=checked)  # noqa: S202 (by the filter above)


class _Bounded(io.RawIOBase):
    """A stream that may not become more than its archive may."""

    def __init__(self, inner: io.BufferedIOBase, archive: Path) -> None:
        self._inner, self._archive, self._packed, self._read = inner, archive, archive.stat().st_size, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._inner.read(len(buffer))
        self._read += len(data)
        refuse_above(self._archive, self._read, self._packed)
        buffer[: len(data)] = data
        return len(data)
