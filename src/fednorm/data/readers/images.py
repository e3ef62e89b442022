"""Image files into one uint8 tensor: found by folder, brought to one size, never held twice."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fednorm.data.image_opening import BadImage, decoding, open_image, own_limit
from fednorm.data.readers.forms import damaged
from fednorm.errors import ConfigError, require

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".gif", ".tif", ".tiff"})


def image_files(folder: Path) -> list[Path]:
    """The images directly in a folder, sorted by name."""
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)


def class_folders(folder: Path) -> list[str]:
    """The names of the sub-folders, sorted: one per class."""
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if not names:
        raise ConfigError(f"{folder} has no class folders; expected {folder}/CLASS/*.jpg")
    return names


def read_image(path: Path, size: tuple[int, int] | None, mode: str = "RGB") -> np.ndarray:
    """One image as (H, W[, C]) uint8; `size` is (height, width). Masks (mode L) are resized by nearest pixel."""
    from PIL import Image

    try:
        with open_image(path) as image, decoding():
            ready = image if mode == "L" and image.mode in ("L", "P") else image.convert(mode)
            if size is not None and ready.size != (size[1], size[0]):
                how = Image.Resampling.BILINEAR if mode == "RGB" else Image.Resampling.NEAREST
                ready = ready.resize((size[1], size[0]), how)
            return np.array(ready)
    except BadImage as bad:
        raise damaged(path, f"it {bad}") from None


def read_images(paths: Sequence[Path], size: tuple[int, int] | None, mode: str = "RGB") -> Tensor:
    """All images as uint8 (N, 3, H, W), or masks as (N, H, W); without `size` that of the first image."""
    require("PIL", "data", "reading image files")
    if not paths:
        raise ConfigError("no image files were found; check that the archive was unpacked completely")
    with own_limit():
        shape = size or read_image(paths[0], None, mode).shape[:2]
    colour = mode == "RGB"
    out = torch.empty((len(paths), 3, *shape) if colour else (len(paths), *shape), dtype=torch.uint8)
    target = out.numpy()

    def fill(index: int) -> None:
        image = read_image(paths[index], (shape[0], shape[1]), mode)
        target[index] = image.transpose(2, 0, 1) if colour else image

    with own_limit(), ThreadPoolExecutor(4) as pool:
        list(pool.map(fill, range(len(paths))))
    return out


def read_class_tree(folder: Path, classes: Sequence[str], size: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
    """Images and labels from folder/CLASS/*; a class without a folder simply has no images."""
    paths, codes = [], []
    for code, name in enumerate(classes):
        found = image_files(folder / name) if (folder / name).is_dir() else []
        paths += found
        codes += [code] * len(found)
    return read_images(paths, size), torch.tensor(codes, dtype=torch.int64)
