"""Users' image files into one uint8 tensor: all grey or all colour, all of one size, never guessed."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fednorm.data.from_files.problems import MOST, listed, refuse
from fednorm.errors import first_line, require

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".gif", ".tif", ".tiff"})
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "GIF", "TIFF")
"""Only these decoders see users' files: Pillow knows dozens, and few are looked after."""
_GREY = frozenset({"1", "L", "LA"})
_DEEP = frozenset({"I", "F", "I;16", "I;16B", "I;16L", "I;16N"})


def read_pictures(paths: Sequence[Path], size: int | None, source: object) -> Tensor:
    """All images as uint8 (N, C, H, W); `size` brings them to so many pixels a side, else all must have one size."""
    require("PIL", "data", "reading image files")
    problems: list[str] = []
    sizes: Counter[tuple[int, int]] = Counter()
    modes: set[str] = set()
    for path in paths:
        try:
            (width, height), mode = _header(path)
        except _Unusable as unusable:
            problems.append(str(unusable))
            if len(problems) == MOST:
                break
            continue
        sizes[(width, height)] += 1
        modes.add(mode)
    if len(sizes) > 1 and size is None:
        seen = listed([f"{width}x{height} ({count})" for (width, height), count in sizes.most_common()], 4)
        problems.append(f"the images of '{source}' differ in size: {seen}; give --image-size N to bring them to N x N")
    refuse(problems, source)
    mode = "L" if modes <= _GREY else "RGB"
    width, height = (size, size) if size is not None else next(iter(sizes))
    out = torch.empty((len(paths), 1 if mode == "L" else 3, height, width), dtype=torch.uint8)
    target = out.numpy()

    def fill(index: int) -> str | None:
        try:
            pixels = _pixels(paths[index], mode, (width, height))
        except _Unusable as unusable:
            return str(unusable)
        target[index] = pixels[None] if mode == "L" else pixels.transpose(2, 0, 1)
        return None

    with ThreadPoolExecutor(4) as pool:
        refuse([problem for problem in pool.map(fill, range(len(paths))) if problem][:MOST], source)
    return out


class _Unusable(Exception):
    """An image that cannot be used, and why."""


def _open(path: Path) -> Image:
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(path, formats=FORMATS)
    except UnidentifiedImageError:
        raise _Unusable(f"'{path}' is not a readable image (none of {', '.join(FORMATS)}); remove it") from None
    except (OSError, SyntaxError, ValueError) as error:
        raise _Unusable(f"'{path}' is not a readable image ({first_line(error)}); remove it") from None


def _header(path: Path) -> tuple[tuple[int, int], str]:
    from PIL import Image

    try:
        with warnings.catch_warnings():  # not while threads are at work: filters are the whole process's
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with _open(path) as image:
                size, mode = image.size, image.mode
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise _Unusable(f"'{path}' has more pixels than any photograph; remove it or make it smaller") from None
    if mode in _DEEP:
        raise _Unusable(
            f"'{path}' has more than 8 bits a pixel (mode {mode}), which would be cut; save it with 8, or use npz:FILE"
        )
    return size, mode


def _pixels(path: Path, mode: str, size: tuple[int, int]) -> np.ndarray:
    from PIL import Image

    with _open(path) as image:
        try:
            image.load()
            ready = image.convert("RGBA") if "transparency" in image.info else image
            ready = ready if ready.mode == mode else ready.convert(mode)
            return np.array(ready if ready.size == size else ready.resize(size, Image.Resampling.BILINEAR))
        except (OSError, SyntaxError, ValueError) as error:
            raise _Unusable(f"'{path}' is not a readable image ({first_line(error)}); remove it") from None
