"""Small files that would become large ones: refused in one line before they take the memory, unless asked for."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import struct
import tarfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from fednorm import files
from fednorm.data import load_dataset
from fednorm.data.archives import unpack
from fednorm.data.bounds import ANY, most_bytes, unpacked
from fednorm.data.from_files.npz import read_arrays
from fednorm.data.from_files.pictures import read_pictures
from fednorm.data.from_files.table_file import read_parquet
from fednorm.data.readers.digits import read_mat
from fednorm.data.readers.images import read_image
from fednorm.data.readers.packed import read_archive
from fednorm.errors import CheckpointError, ConfigError
from fednorm.files import read_json
from fednorm.running.recipe import read_recipe

MANY = 3_000_000
ZEROS = bytes(MANY)


@pytest.fixture
def one_megabyte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDNORM_MAX_GB", "0.001")


def refusal(work: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        work()
    return str(caught.value)


def said(path: Path, most: str = "1,000,000") -> str:
    return (
        f"'{path}' has {path.stat().st_size:,} bytes and would become more than {most}, which data do not; "
        "if you trust it, set FEDNORM_MAX_GB to the gigabytes it may take"
    )


def packed(path: Path) -> Path:
    kind = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}[path.suffix]
    path.write_bytes(kind(ZEROS))
    return path


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2"])
def test_a_packed_file(one_megabyte: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, suffix: str) -> None:
    path = packed(tmp_path / f"a{suffix}")
    assert refusal(lambda: unpacked(path)) == said(path)
    monkeypatch.setenv("FEDNORM_MAX_GB", "0.003")
    assert unpacked(path) == ZEROS
    path.write_bytes(path.read_bytes() * 2)  # several in a row count together
    assert refusal(lambda: unpacked(path)) == said(path, "3,000,000")
    path.write_bytes(path.read_bytes()[:-30])
    monkeypatch.setenv("FEDNORM_MAX_GB", "1")
    with pytest.raises((EOFError, OSError, lzma.LZMAError)):
        unpacked(path)


@pytest.mark.slow
def test_a_bomb_takes_no_more_memory_than_any_file_may(tmp_path: Path) -> None:
    block = zlib.compressobj(wbits=31)
    path = tmp_path / "train-labels-idx1-ubyte.gz"
    path.write_bytes(b"".join([block.compress(bytes(1 << 20)) for _ in range(300)]) + block.flush())
    assert path.stat().st_size < 400_000
    tracemalloc.start()
    text = refusal(lambda: unpacked(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (text, peak < 3 * ANY) == (said(path, "268,435,456"), True)


def test_how_much_a_file_may_become(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (most_bytes(150_000), most_bytes(50_000_000)) == (256 << 20, 5_000_000_000)
    monkeypatch.setenv("FEDNORM_MAX_GB", "2.5")
    assert (most_bytes(1), most_bytes(10**12)) == (2_500_000_000, 2_500_000_000)
    for wrong in ("many", "-1", "0", "nan", "inf"):
        monkeypatch.setenv("FEDNORM_MAX_GB", wrong)
        assert refusal(lambda: most_bytes(1)) == (
            f"FEDNORM_MAX_GB='{wrong}' is no number of gigabytes; give one such as 8"
        )


@pytest.mark.parametrize("read", [read_arrays, read_archive])
def test_an_archive_of_arrays(one_megabyte: None, tmp_path: Path, read: Callable[[Path], object]) -> None:
    path = tmp_path / "own.npz"
    np.savez_compressed(path, x=np.zeros((MANY // 8, 1)), y=np.zeros(2, np.int64))
    assert refusal(lambda: read(path)) == said(path)


@pytest.mark.parametrize("read", [read_arrays, read_archive])
@pytest.mark.parametrize("shape", [(10**12, 3), (-1, -8), (-24, 1), (2**40, 2**40)])
def test_a_header_that_lies(tmp_path: Path, read: Callable[[Path], object], shape: tuple[int, int]) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(tmp_path / "own.npz", "w") as archive:
        archive.writestr("x.npy", header.getvalue() + bytes(8))
    size = shape[0] * shape[1]
    assert refusal(lambda: read(tmp_path / "own.npz")) == (
        f"'{tmp_path}/own.npz': x says it has {size:,} bytes, which its file does not hold; save it again"
    )


def test_matlab(one_megabyte: None, tmp_path: Path) -> None:
    path = tmp_path / "train.mat"
    content = {"X": np.zeros((32, 32, 3, 1000), np.uint8), "y": np.ones((1000, 1), np.uint8)}
    savemat(path, content, do_compression=True)
    assert refusal(lambda: read_mat(path)) == said(path)


def test_a_table_of_one_value(one_megabyte: None, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"a": np.zeros(MANY // 8, np.int64)}), path)
    assert refusal(lambda: read_parquet(path)) == said(path)


def test_a_zip(one_megabyte: None, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("set/a", ZEROS)
    assert refusal(lambda: unpack(tmp_path / "a.zip")) == said(tmp_path / "a.zip")
    assert [path.name for path in tmp_path.iterdir()] == ["a.zip"]


@pytest.mark.parametrize("where", ["content", "header"])
def test_a_tar(one_megabyte: None, tmp_path: Path, where: str) -> None:
    found = tarfile.TarInfo("set/a")
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz", format=tarfile.PAX_FORMAT) as archive:
        if where == "header":
            found.pax_headers = {"comment": "x" * MANY}
            archive.addfile(found)
        else:
            found.size = MANY
            archive.addfile(found, io.BytesIO(ZEROS))
    assert refusal(lambda: unpack(tmp_path / "a.tar.gz")) == said(tmp_path / "a.tar.gz")
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar.gz"]


def png(path: Path, width: int, height: int) -> Path:
    """An image that says how large it is, and has hardly any pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    content = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(bytes(100))), chunk(b"IEND", b"")]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(content))
    return path


@pytest.mark.parametrize("side", [9_500, 40_000, 2**31 - 1])
def test_an_image(tmp_path: Path, side: int) -> None:
    path = png(tmp_path / "a.png", side, side)
    assert refusal(lambda: read_pictures([path], None, "folder:x")) == (
        f"'{path}' has more than 89,478,485 pixels; remove it or make it smaller"
    )
    for domain in ("art_painting", "cartoon", "photo", "sketch"):
        (tmp_path / "PACS" / domain / "dog").mkdir(parents=True)
        inner = png(tmp_path / "PACS" / domain / "dog" / "a.png", side, side)
    assert "is damaged: it has more than 89,478,485 pixels; delete it and get it again" in refusal(
        lambda: load_dataset("pacs", tmp_path)
    )
    assert inner.exists()


def test_an_image_without_its_pixels(tmp_path: Path) -> None:
    path = png(tmp_path / "a.png", 300, 300)
    assert refusal(lambda: read_image(path, None)).startswith(f"{path} is damaged: it is not a readable image (")


def test_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_TEXT", 1000)
    (tmp_path / "config.json").write_text(" " * 1001)
    for read in (read_json, read_recipe):
        with pytest.raises(CheckpointError) as caught:
            read(tmp_path / "config.json")
        assert str(caught.value) == (
            f"'{tmp_path}/config.json' has more than 1,000 bytes, which no such file has; give another"
        )
