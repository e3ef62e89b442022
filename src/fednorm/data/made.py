"""Data sets that can be made: MNIST-M from MNIST and photographs, digits rendered from fonts.

Both are our own renditions of Ganin and Lempitsky's descriptions (2015), not the authors' draws: numbers on them
compare in kind, not to the decimal. They are written in the packed form that `load_dataset` reads.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from fednorm.core import rng
from fednorm.data.load import load_dataset
from fednorm.data.readers.idx import DIGITS
from fednorm.data.readers.images import image_files, read_image
from fednorm.errors import ConfigError, require
from fednorm.files import written_whole

if TYPE_CHECKING:
    from PIL import ImageFont

TRAIN, TEST = 7_438, 3_000
SHEET = 100
MNIST_ROWS = {"train": range(50_000, 50_000 + TRAIN), "test": range(7_000, 7_000 + TEST)}
"""MNIST-M takes the rows that the MNIST domain of digits_five leaves alone."""


def _generator(seed: int, *words: int | str) -> np.random.Generator:
    return np.random.default_rng(rng.as_seed(rng.key(seed, "made", *words)))


def write_packed(path: Path, splits: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """Write (images N x H x W x 3, labels) per split as lossless WebP sheets; the file appears whole or not at all."""
    from PIL import Image

    arrays: dict[str, np.ndarray] = {}
    for split, (images, codes) in splits.items():
        pieces = []
        for start in range(0, len(images), SHEET):
            sheet = images[start : start + SHEET]
            buffer = io.BytesIO()
            Image.fromarray(sheet.reshape(-1, sheet.shape[2], 3)).save(buffer, "WEBP", lossless=True, method=4)
            pieces.append(buffer.getvalue())
        arrays[f"{split}_blob"] = np.frombuffer(b"".join(pieces), np.uint8)
        arrays[f"{split}_off"] = np.cumsum([0, *map(len, pieces)])
        arrays[f"y_{split}"] = codes.astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as draft, draft.open("wb") as file:
        np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]


def blend(digits: np.ndarray, photos: Sequence[np.ndarray], draw: np.random.Generator) -> np.ndarray:
    """|patch - digit| per channel, with a patch cut at random from a random photograph for every digit."""
    height, width = digits.shape[1:]
    out = np.empty((*digits.shape, 3), dtype=np.uint8)
    for index, digit in enumerate(digits):
        photo = photos[int(draw.integers(len(photos)))]
        top, left = draw.integers(photo.shape[0] - height + 1), draw.integers(photo.shape[1] - width + 1)
        patch = photo[top : top + height, left : left + width].astype(np.int16)
        out[index] = np.abs(patch - digit[..., None].astype(np.int16))
    return out


def make_mnist_m(data_dir: str | Path, photos: str | Path, *, seed: int = 0) -> Path:
    """Make data_dir/mnist_m.npz from the MNIST in that folder and a folder of photographs (BSDS500 in the paper)."""
    require("PIL", "data", "making mnist_m")
    mnist = load_dataset("mnist", data_dir)
    files = image_files(Path(photos)) if Path(photos).is_dir() else []
    pictures = [picture for file in files if min((picture := read_image(file, None)).shape[:2]) >= 28]
    if not pictures:
        raise ConfigError(f"{photos} has no photographs of at least 28x28 pixels; give a folder of .jpg or .png files")
    pools = {"train": (mnist.train_x, mnist.train_y), "test": (mnist.test_x, mnist.test_y)}
    splits = {}
    for split, rows in MNIST_ROWS.items():
        x, y = (pool[rows.start : rows.stop].numpy() for pool in pools[split])
        splits[split] = blend(x[:, 0], pictures, _generator(seed, "mnist_m", split)), y
    target = Path(data_dir) / "mnist_m.npz"
    write_packed(target, splits)
    return target


def _glyphs(font: ImageFont.FreeTypeFont) -> np.ndarray:
    """The ten digits of a font, each stretched to 16x16, with mean 0 and length 1; all zero where nothing is drawn."""
    from PIL import Image, ImageDraw

    rows = np.zeros((len(DIGITS), 256))
    for row, digit in zip(rows, DIGITS, strict=True):
        canvas = Image.new("L", (96, 96))
        ImageDraw.Draw(canvas).text((48, 48), digit, font=font, fill=255, anchor="mm")
        if (box := canvas.getbbox()) is not None:
            row[:] = np.asarray(canvas.crop(box).resize((16, 16)), dtype=np.float64).reshape(-1)
            row -= row.mean()
            row /= np.linalg.norm(row) + 1e-9
    return rows


def fonts_with_digits(folder: Path) -> list[Path]:
    """The .ttf and .otf files whose digits look like digits; symbol fonts draw arrows, boxes or nothing instead.

    At least eight of the ten must be more like their namesake in Pillow's own font than like any other digit.
    """
    from PIL import ImageFont

    reference = _glyphs(cast("ImageFont.FreeTypeFont", ImageFont.load_default(48)))
    found = []
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() not in (".ttf", ".otf"):
            continue
        try:
            likeness = _glyphs(ImageFont.truetype(str(path), 48)) @ reference.T
        except OSError:
            continue
        if (likeness.argmax(1) == np.arange(len(DIGITS))).sum() >= 8 and likeness.max(1).min() > 0:
            found.append(path)
    return found


def render_digit(label: int, fonts: Sequence[Path | None], draw: np.random.Generator) -> np.ndarray:
    """One 32x32 image: a digit, sometimes with neighbours, in a random font, place, turn, colours and blur."""
    from PIL import Image, ImageDraw, ImageFilter, ImageFont

    colours = draw.integers(0, 256, size=(2, 3))
    while np.abs(colours[0] - colours[1]).sum() < 150:  # the digit must be told from its background
        colours = draw.integers(0, 256, size=(2, 3))
    ground, ink = (tuple(int(value) for value in colour) for colour in colours)
    font_file = fonts[int(draw.integers(len(fonts)))]
    size = int(draw.integers(36, 54))
    font = ImageFont.load_default(size) if font_file is None else ImageFont.truetype(str(font_file), size)
    left, right = (str(draw.integers(10)) if draw.random() < 0.35 else "" for _ in range(2))
    # Drawn at twice the size with a margin, turned about the centre, then cut and made smaller: no corners show.
    canvas = Image.new("RGB", (96, 96), ground)
    pen = ImageDraw.Draw(canvas)
    shift = draw.integers(-5, 6, size=2)
    centre = (48 + int(shift[0]), 48 + int(shift[1]))
    pen.text(centre, str(label), font=font, fill=ink, anchor="mm")
    half = pen.textlength(str(label), font=font) / 2 + 1
    pen.text((centre[0] - half, centre[1]), left, font=font, fill=ink, anchor="rm")
    pen.text((centre[0] + half, centre[1]), right, font=font, fill=ink, anchor="lm")
    turned = canvas.rotate(float(draw.uniform(-20, 20)), Image.Resampling.BILINEAR, fillcolor=ground)
    small = turned.crop((16, 16, 80, 80)).resize((32, 32), Image.Resampling.BILINEAR)
    return np.array(small.filter(ImageFilter.GaussianBlur(float(draw.uniform(0, 1.0)))))


def make_synth_digits(data_dir: str | Path, fonts: str | Path | None = None, *, seed: int = 0) -> Path:
    """Render data_dir/synth_digits.npz from a folder of .ttf and .otf fonts, or from Pillow's own font alone."""
    require("PIL", "data", "rendering digits")
    files: list[Path | None] = [None]
    if fonts is not None:
        files = [*fonts_with_digits(Path(fonts))]
        if not files:
            raise ConfigError(f"{fonts} has no .ttf or .otf font with ten digits; give another folder, or none")
    splits = {}
    for split, count in (("train", TRAIN), ("test", TEST)):
        draw = _generator(seed, "synth_digits", split)
        codes = draw.integers(len(DIGITS), size=count)
        splits[split] = np.stack([render_digit(int(code), files, draw) for code in codes]), codes
    target = Path(data_dir) / "synth_digits.npz"
    write_packed(target, splits)
    return target
