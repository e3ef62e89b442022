"""Packed sets: numpy archives whose images are raw bytes or WebP pieces in one long array."""

from __future__ import annotations

import io
import itertools
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fednorm.data.bounds import unpacked
from fednorm.data.image_opening import decoding, open_image
from fednorm.data.members import check_members
from fednorm.data.readers.forms import damaged
from fednorm.errors import ConfigError, FednormError, first_line, require


def read_archive(path: Path, *names: str) -> dict[str, np.ndarray]:
    """The named arrays (default: all) of a .npz or .npz.xz file; never unpickles."""
    try:
        content = io.BytesIO(unpacked(path)) if path.suffix == ".xz" else path
        with zipfile.ZipFile(content) as archive:
            check_members(archive, path, names or None)
        if isinstance(content, io.BytesIO):
            content.seek(0)
        with np.load(content, allow_pickle=False) as stored:
            return {name: stored[name] for name in names or stored.files}
    except FednormError:
        raise
    except KeyError as error:
        raise ConfigError(f"{path} is not the expected archive: {error.args[0]}") from error
    except Exception as error:  # whatever zipfile and numpy make of damaged bytes
        raise damaged(path, first_line(error)) from error


def labels(array: np.ndarray) -> Tensor:
    """Labels as int64."""
    return torch.from_numpy(array.astype(np.int64))


def grey(array: np.ndarray) -> Tensor:
    """Grey images (N, H, W) with their one channel."""
    return torch.from_numpy(array)[:, None]


def _decode(piece: bytes, mode: str) -> np.ndarray:
    with open_image(io.BytesIO(piece)) as image, decoding():
        return np.asarray(image.convert(mode) if image.mode != mode and mode == "RGB" else image)


def unpack_into(out: Tensor, blob: np.ndarray, offsets: np.ndarray) -> None:
    """Decode WebP pieces straight into `out` (N, 3, H, W), so nothing is held twice.

    A piece is one image or a sheet of images one below the other, the same number on every sheet but the last.
    """
    require("PIL", "data", "reading this packed data set")
    height, width = out.shape[2:]
    target = out.numpy()

    def images(index: int) -> np.ndarray:
        sheet = _decode(blob[offsets[index] : offsets[index + 1]].tobytes(), "RGB")
        return sheet.reshape(-1, height, width, 3).transpose(0, 3, 1, 2)

    per_sheet = len(images(0))

    def fill(index: int) -> int:
        found = images(index)
        target[index * per_sheet : index * per_sheet + len(found)] = found
        return len(found)

    with ThreadPoolExecutor(2) as pool:
        total = sum(pool.map(fill, range(len(offsets) - 1)))
    if total != len(out):
        raise ConfigError(f"a packed data set holds {total} images where {len(out)} were announced; get it again")


def unpack(blob: np.ndarray, offsets: np.ndarray, count: int, height: int, width: int) -> Tensor:
    """All images of a blob as uint8 (count, 3, height, width)."""
    out = torch.empty((count, 3, height, width), dtype=torch.uint8)
    unpack_into(out, blob, offsets)
    return out


def unpack_masks(blob: np.ndarray, offsets: np.ndarray) -> Tensor:
    """Label masks stored one to a piece, uint8 (N, H, W)."""
    require("PIL", "data", "reading this packed data set")
    pieces = (blob[start:stop].tobytes() for start, stop in itertools.pairwise(offsets))
    return torch.from_numpy(np.stack([_decode(piece, "L") for piece in pieces]))
