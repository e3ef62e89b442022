"""Small folders, tables and archives as users have them, made by tests."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

CLIENTS = ("amber", "birch", "cedar")
CLASSES = ("cat", "dog")
HEADER = ("age", "city", "site", "sick")


def save_image(path: Path, level: int, size: tuple[int, int] = (16, 16), mode: str = "L") -> None:
    """An image of one grey or colour with a pattern, (width, height)."""
    image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    pattern = np.arange(size[0] * size[1]).reshape(size[1], size[0]) % 8
    pixels = (pattern + level).astype(np.uint8)
    image.fromarray(pixels).convert(mode).save(path)


def image_folder(root: Path, clients: Sequence[str] = CLIENTS, each: int = 6, split: bool = False) -> Path:
    """DIR/CLIENT/CLASS/*.png, or with train and test in between; clients differ in brightness."""
    for c, client in enumerate(clients):
        for k, label in enumerate(CLASSES):
            for i in range(each):
                part = ("test" if i % 3 == 0 else "train") if split else ""
                save_image(root / client / part / label / f"{i}.png", 30 * c + 90 * k + i)
    return root


def table_rows(each: int = 20) -> list[Sequence[object]]:
    """People of three sites, some sick: the older ones, with exceptions."""
    rows: list[Sequence[object]] = []
    for s, site in enumerate(CLIENTS):
        for i in range(each):
            age = 20 + 3 * i + s
            rows.append((age + 0.5, "XY"[i % 2], site, "yes" if (age > 50) != (i % 7 == 0) else "no"))
    return rows


def save_table(path: Path, rows: Iterable[Sequence[object]], header: Sequence[str] = HEADER) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
    return path
