"""Download a data set from its home: resumed after a break, checked against its published MD5, put in place at once.

Nothing here runs unless it is asked for. Standard library only.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from fednorm.data.archives import unpack
from fednorm.data.registry import DATASETS
from fednorm.data.sources import BY_HAND, DOWNLOADS, Download
from fednorm.errors import ConfigError, DiskError, unknown
from fednorm.files import draft_of, open_plain

Progress = Callable[[str, int, int | None], None]
"""(path below the data folder, bytes so far, bytes in all where known)"""
BLOCK = 1 << 18
ATTEMPTS = 3


def fetch(
    name: str,
    data_dir: str | Path,
    progress: Progress | None = None,
    *,
    downloads: Sequence[Download] | None = None,
    timeout: float = 30.0,
) -> list[Path]:
    """Bring the files of a data set into the folder and return what was put there.

    A broken download is resumed by the next call. `downloads` replaces the official addresses, for a mirror.
    """
    key = name.replace("-", "_")
    if key not in DATASETS:
        raise unknown("data set", name, DATASETS, "fednorm datasets")
    if DATASETS[key].embedded:
        raise ConfigError(f"{key} is embedded in fednorm; there is nothing to fetch")
    if downloads is None and key not in DOWNLOADS:
        raise ConfigError(f"{key} cannot be fetched by a program; to get it, {BY_HAND[key]} (below {data_dir})")
    folder = Path(data_dir)
    report = progress or (lambda path, done, total: None)
    try:
        return [
            path
            for download in (DOWNLOADS[key] if downloads is None else downloads)
            for path in _fetch_one(download, folder, report, timeout)
        ]
    except OSError as error:
        raise DiskError(
            f"cannot write to {folder}: {error.strerror or error}; free some space or choose another"
        ) from error


def _fetch_one(download: Download, folder: Path, report: Progress, timeout: float) -> list[Path]:
    target = folder / download.path
    target.parent.mkdir(parents=True, exist_ok=True)
    if not (target.exists() and md5_of(target) == download.md5):
        part = draft_of(target)
        _download(download, part, report, timeout)
        if (found := md5_of(part)) != download.md5:
            part.unlink()
            raise ConfigError(
                f"{download.url} has MD5 {found}, expected {download.md5}; the file was deleted, so try again, and if "
                "it happens twice the home has changed"
            )
        os.replace(part, target)
    if not download.unpack:
        return [target]
    placed = unpack(target, download.brings)
    target.unlink()
    return placed


def md5_of(path: Path) -> str:
    """The MD5 of a file; good against broken lines, not against forgers."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _download(download: Download, part: Path, report: Progress, timeout: float) -> None:
    """Fill `part`, continuing where it ends; a few breaks of the line are taken in stride."""
    if not download.url.startswith(("http://", "https://")):
        raise ConfigError(f"{download.url} is not an http or https address")
    problem = ""
    for _ in range(ATTEMPTS):
        try:
            if _continue(download, part, report, timeout):
                return
            problem = "the connection ended early"
        except urllib.error.HTTPError as error:
            raise ConfigError(
                f"{download.url} answered {error.code} {error.reason}; try later, or get the file by hand and put it "
                f"at {part.with_suffix('')}"
            ) from error
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
            problem = str(getattr(error, "reason", error)) or type(error).__name__
    held = part.stat().st_size if part.exists() else 0
    raise ConfigError(
        f"{download.url} could not be read to its end: {problem} after {held} bytes; "
        "run the same command again to continue"
    )


def _continue(download: Download, part: Path, report: Progress, timeout: float) -> bool:
    """One request for what is still missing; True once all is there."""
    start = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(download.url, headers={"User-Agent": "fednorm"})  # noqa: S310 (checked above)
    if start:
        request.add_header("Range", f"bytes={start}-")
    try:
        answer = urllib.request.urlopen(request, timeout=timeout)  # noqa: S310
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
        error.close()
        if md5_of(part) == download.md5:
            return True
        part.unlink()  # longer than the real file: it never was a piece of it
        return False
    with answer:
        resumed = answer.status == http.HTTPStatus.PARTIAL_CONTENT
        done = start if resumed else 0  # a server without ranges sends everything again
        length = answer.headers.get("Content-Length")
        total = done + int(length) if length is not None and length.isdigit() else None
        _refuse_more(download, part, total or 0)
        with os.fdopen(
            open_plain(part, os.O_WRONLY | os.O_CREAT | (os.O_APPEND if resumed else os.O_TRUNC)), "wb"
        ) as file:
            while block := answer.read(BLOCK):
                done += len(block)
                _refuse_more(download, part, done)
                file.write(block)
                report(download.path, done, total)
    return total is None or done >= total


def _refuse_more(download: Download, part: Path, size: int) -> None:
    """Refuse a home that sends without an end, or something else than was asked for."""
    if size > download.most_bytes:
        part.unlink(missing_ok=True)
        raise ConfigError(
            f"{download.url} has more than the {download.most_bytes:,} bytes it may have; nothing was kept, and if it "
            "happens twice the home has changed"
        )
