"""Users' image files into one uint8 tensor: all grey or all colour, all of one size, never guessed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fednorm.data.from_files.problems import MOST, listed, refuse
from fednorm.data.image_opening import BadImage, decoding, open_image, own_limit
from fednorm.errors import require

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".gif", ".tif", ".tiff"})
_GREY = frozenset({"1", "L", "LA"})
_DEEP = frozenset({"I", "F", "I;16", "I;16B", "I;16L", "I;16N"})


def read_pictures(paths: Sequence[Path], size: int | None, source: object) -> Tensor:
    """All images as uint8 (N, C, H, W); `size` brings them to so many pixels a side, else all must have one size."""
    require("PIL", "data", "reading image files")
    problems: list[str] = []
    sizes: Counter[tuple[int, int]] = Counter()
    modes: set[str] = set()
    with own_limit():
        for path in paths:
            try:
                (width, height), mode = _header(path)
            except BadImage as bad:
                problems.append(_problem(path, bad))
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
        except BadImage as bad:
            return _problem(paths[index], bad)
        target[index] = pixels[None] if mode == "L" else pixels.transpose(2, 0, 1)
        return None

    with own_limit(), ThreadPoolExecutor(4) as pool:
        refuse([problem for problem in pool.map(fill, range(len(paths))) if problem][:MOST], source)
    return out


def _problem(path: Path, bad: BadImage) -> str:
    return f"'{path}' {bad}; {bad.fix}"


def _header(path: Path) -> tuple[tuple[int, int], str]:
    with open_image(path) as image:
        if image.mode in _DEEP:
            what = f"has more than 8 bits a pixel (mode {image.mode}), which would be cut"
            raise BadImage(what, "save it with 8, or use npz:FILE")
        return image.size, image.mode


def _pixels(path: Path, mode: str, size: tuple[int, int]) -> np.ndarray:
    from PIL import Image

    with open_image(path) as image, decoding():
        image.load()
        ready = image.convert("RGBA") if "transparency" in image.info else image
        ready = ready if ready.mode == mode else ready.convert(mode)
        return np.array(ready if ready.size == size else ready.resize(size, Image.Resampling.BILINEAR))
