"""The operations of an augmentation: what each draws, and where the pixels of its output come from.

What is drawn are two whole numbers for each image, so that draws of all operations lie in one tensor and no device can
round differently.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fednorm.core import rng

Coordinates = tuple[Tensor, Tensor]
"""Source rows and columns, broadcastable to (B, H, W)."""
Values = tuple[float, ...]
"""The parameters of an operation, in its own order."""
Draw = Callable[[Tensor, int, int, int, Values], Tensor]
"""(key, batch, height and width of the input, parameters) -> two whole numbers for each image, (batch, 2)."""
MapBack = Callable[[Coordinates, Coordinates, int, int], Coordinates]
"""(coordinates in the output, drawn numbers, height and width of the input) -> coordinates in the input."""

_ANGLES = 4096
_FRACTION = 16
_GRID = 128
_HALF_WORD = 32
_LUCK = 31


def _draw_crop(key: Tensor, batch: int, height: int, width: int, values: Values) -> Tensor:
    pad = int(values[0])
    return (rng.integers(key, 2 * pad + 1, (2, batch)) - pad).T


def _shift(at: Coordinates, drawn: Coordinates, height: int, width: int) -> Coordinates:
    return at[0] + drawn[0], at[1] + drawn[1]


def _stay(at: Coordinates, drawn: Coordinates, height: int, width: int) -> Coordinates:
    return at


def _draw_flip(key: Tensor, batch: int, height: int, width: int, values: Values) -> Tensor:
    return (rng.uniform(key, (batch, 1)) < values[0]).to(torch.int64).expand(batch, 2)


def _flip(at: Coordinates, drawn: Coordinates, height: int, width: int) -> Coordinates:
    return at[0], torch.where(drawn[0] > 0, width - 1 - at[1], at[1])


@lru_cache(maxsize=8)
def _turns(degrees: float) -> tuple[tuple[int, int], ...]:
    """Cosine and sine of angles from -degrees to degrees in fixed point: devices differ in the last bit of a cosine."""
    angles = (math.radians(degrees) * (2 * i / (_ANGLES - 1) - 1) for i in range(_ANGLES))
    one = 1 << _FRACTION
    return tuple((round(one * math.cos(angle)), round(one * math.sin(angle))) for angle in angles)


def _draw_rotation(key: Tensor, batch: int, height: int, width: int, values: Values) -> Tensor:
    table = torch.tensor(_turns(values[0]), device=key.device)
    return table[rng.integers(key, _ANGLES, (batch,))]


def _rotate(at: Coordinates, drawn: Coordinates, height: int, width: int) -> Coordinates:
    cos, sin = drawn
    # Twice the distance from the centre, so that the centre of an even image is a whole number too.
    dy, dx = 2 * at[0] - (height - 1), 2 * at[1] - (width - 1)
    y, x = cos * dy - sin * dx, sin * dy + cos * dx
    return tuple((value + (size << _FRACTION)) >> (_FRACTION + 1) for value, size in ((y, height), (x, width)))  # type: ignore[return-value]


def _draw_window(key: Tensor, batch: int, height: int, width: int, values: Values) -> Tensor:
    size = int(values[0])
    rows = rng.integers(rng.key(key, 0), max(height - size, 0) + 1, (batch,))
    columns = rng.integers(rng.key(key, 1), max(width - size, 0) + 1, (batch,))
    return torch.stack([rows, columns], 1)


@lru_cache(maxsize=8)
def _crop_shapes(height: int, width: int, values: Values, device: torch.device) -> Tensor:
    """Heights and widths of crops, each as likely as any other: even shares of the area, even logarithms of the ratio.

    Those that do not fit into the image are left out, where torchvision draws again.
    """
    low, high, ratio = values
    steps = [(index + 0.5) / _GRID for index in range(_GRID)]
    found: list[tuple[int, int]] = []
    for share in steps:
        area = height * width * (low + (high - low) * share)
        for step in steps:
            stretch = ratio ** (2 * step - 1)
            shape = max(1, round(math.sqrt(area / stretch))), max(1, round(math.sqrt(area * stretch)))
            if shape[0] <= height and shape[1] <= width:
                found.append(shape)
    return torch.tensor(found or [(height, width)], device=device)


def _draw_resized_crop(key: Tensor, batch: int, height: int, width: int, values: Values) -> Tensor:
    table = _crop_shapes(height, width, values, key.device)
    shape = table[rng.integers(rng.key(key, 0), len(table), (batch,))]
    room = torch.tensor((height + 1, width + 1), device=key.device) - shape
    start = (rng.integers(rng.key(key, 1), 1 << _LUCK, (batch, 2)) * room) >> _LUCK
    return (start << _HALF_WORD) | shape


def crop_of(drawn: Tensor) -> tuple[Tensor, Tensor]:
    """Where a drawn crop begins, and how long it is, along one axis."""
    return drawn >> _HALF_WORD, drawn & ((1 << _HALF_WORD) - 1)


@dataclass(frozen=True)
class Parameter:
    """A number that an operation is told: whole where there is no default."""

    name: str
    default: float | None
    low: float
    high: float


@dataclass(frozen=True)
class Operation:
    """One step of an augmentation."""

    draw: Draw
    parameters: tuple[Parameter, ...]
    summary: str
    map_back: MapBack = _stay
    resamples: bool = False
    """whether it draws a crop (`crop_of`) that is brought back to the old size, so that pixels are mixed"""


OPERATIONS: dict[str, Operation] = {
    "crop": Operation(
        _draw_crop,
        (Parameter("pixels", None, 1, 512),),
        "pad with black, then cut the old size at random",
        _shift,
    ),
    "flip": Operation(_draw_flip, (Parameter("chance", 0.5, 0, 1),), "mirror left and right", _flip),
    "rotate": Operation(
        _draw_rotation,
        (Parameter("degrees", 30, 0, 180),),
        "turn by up to this many degrees, nearest pixel",
        _rotate,
    ),
    "window": Operation(
        _draw_window, (Parameter("size", None, 1, 65536),), "cut a square of this size at random", _shift
    ),
    "resized_crop": Operation(
        _draw_resized_crop,
        (
            Parameter("low", 0.08, 1e-6, 1),
            Parameter("high", 1.0, 1e-6, 1),
            Parameter("ratio", 4 / 3, 1, 100),
        ),
        "cut a part of low to high of the area, up to ratio wider or higher than square, and bring it to the old size",
        resamples=True,
    ),
}
