"""Augmentation on tensors: one gather for a whole batch, drawn from a key, equal on CPU, on CUDA and under vmap.

Every operation is a map from output pixels to source pixels in whole numbers, so a chain of them is still one gather
and no device can round differently. Pixels from outside the image are 0 (black), mask pixels `mask_fill`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fednorm import rng
from fednorm.errors import ConfigError, unknown

Coordinates = tuple[Tensor, Tensor]
"""Source rows and columns, broadcastable to (B, H, W)."""
MapBack = Callable[[Coordinates, Tensor, int, int, int, float], Coordinates]
"""(coordinates in the output, key, batch, height and width of the input, parameter) -> coordinates in the input."""

_ANGLES = 4096
_FRACTION = 16


def _crop(at: Coordinates, key: Tensor, batch: int, height: int, width: int, pad: float) -> Coordinates:
    shift = rng.integers(key, 2 * int(pad) + 1, (2, batch, 1, 1)) - int(pad)
    return at[0] + shift[0], at[1] + shift[1]


def _flip(at: Coordinates, key: Tensor, batch: int, height: int, width: int, chance: float) -> Coordinates:
    turned = rng.uniform(key, (batch, 1, 1)) < chance
    return at[0], torch.where(turned, width - 1 - at[1], at[1])


@lru_cache(maxsize=8)
def _turns(degrees: float) -> tuple[tuple[int, int], ...]:
    """Cosine and sine of angles from -degrees to degrees in fixed point: devices differ in the last bit of a cosine."""
    angles = (math.radians(degrees) * (2 * i / (_ANGLES - 1) - 1) for i in range(_ANGLES))
    one = 1 << _FRACTION
    return tuple((round(one * math.cos(angle)), round(one * math.sin(angle))) for angle in angles)


def _rotate(at: Coordinates, key: Tensor, batch: int, height: int, width: int, degrees: float) -> Coordinates:
    table = torch.tensor(_turns(degrees), device=key.device)
    turn = table[rng.integers(key, _ANGLES, (batch,))][:, :, None, None]
    cos, sin = turn[:, 0], turn[:, 1]
    # Twice the distance from the centre, so that the centre of an even image is a whole number too.
    dy, dx = 2 * at[0] - (height - 1), 2 * at[1] - (width - 1)
    y, x = cos * dy - sin * dx, sin * dy + cos * dx
    return tuple((value + (size << _FRACTION)) >> (_FRACTION + 1) for value, size in ((y, height), (x, width)))  # type: ignore[return-value]


def _window(at: Coordinates, key: Tensor, batch: int, height: int, width: int, size: float) -> Coordinates:
    rows = rng.integers(rng.key(key, 0), max(height - int(size), 0) + 1, (batch, 1, 1))
    columns = rng.integers(rng.key(key, 1), max(width - int(size), 0) + 1, (batch, 1, 1))
    return at[0] + rows, at[1] + columns


@dataclass(frozen=True)
class _Kind:
    map_back: MapBack
    parameter: str
    default: float | None
    low: float
    high: float
    summary: str


OPERATIONS: dict[str, _Kind] = {
    "crop": _Kind(_crop, "pixels", None, 1, 512, "pad with black by some pixels, then cut the old size at random"),
    "flip": _Kind(_flip, "chance", 0.5, 0, 1, "mirror left and right"),
    "rotate": _Kind(_rotate, "degrees", 30, 0, 180, "turn by up to so many degrees, nearest pixel"),
    "window": _Kind(_window, "size", None, 1, 65536, "cut a square of this size at random"),
}


@dataclass(frozen=True)
class Augmentation:
    """A parsed chain: operation names with their parameter, first to last."""

    steps: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        return "+".join(f"{name}({value:g})" for name, value in self.steps) or "none"


def parse(spec: str | Augmentation) -> Augmentation:
    """A chain from text such as "none", "flip" or "crop(2)+flip".

    >>> str(parse("crop(2) + flip"))
    'crop(2)+flip(0.5)'
    """
    if isinstance(spec, Augmentation):
        return spec
    text = spec.replace(" ", "")
    if text in ("", "none"):
        return Augmentation(())
    return Augmentation(tuple(_parse_step(step, spec) for step in text.split("+")))


def _parse_step(step: str, spec: str) -> tuple[str, float]:
    match = re.fullmatch(r"([a-z_]+)(?:\(([^()]*)\))?", step)
    if match is None:
        raise ConfigError(f"augmentation '{spec}' cannot be read at '{step}'; write it like crop(2)+flip, or none")
    name, argument = match.groups()
    if name not in OPERATIONS:
        raise unknown("augmentation", name, [*OPERATIONS, "none"])
    kind = OPERATIONS[name]
    if not argument:
        if kind.default is None:
            raise ConfigError(f"augmentation '{name}' needs its {kind.parameter}, as in {name}({kind.low + 3:g})")
        return name, float(kind.default)
    try:
        value = float(argument)
    except ValueError:
        value = math.nan
    whole = kind.default is None
    if not kind.low <= value <= kind.high or (whole and value != int(value)):
        numbers = "a whole number" if whole else "a number"
        raise ConfigError(
            f"augmentation '{name}': {kind.parameter} must be {numbers} from {kind.low:g} to {kind.high:g}, "
            f"not '{argument}'"
        )
    return name, value


def augment(x: Tensor, key: Tensor, spec: str | Augmentation) -> Tensor:
    """Augment a batch (B, C, H, W) of any dtype; `key` is one 64-bit key from `fednorm.rng`.

    >>> x = torch.arange(8, dtype=torch.uint8).reshape(2, 1, 2, 2)
    >>> augment(x, rng.key(0), "flip(1)").flatten().tolist()
    [1, 0, 3, 2, 5, 4, 7, 6]
    """
    return _gather(x, None, key, parse(spec), 0)[0]


def augment_with_mask(
    x: Tensor, mask: Tensor, key: Tensor, spec: str | Augmentation, mask_fill: int = 255
) -> tuple[Tensor, Tensor]:
    """Augment images (B, C, H, W) and their masks (B, H, W) alike."""
    return _gather(x, mask, key, parse(spec), mask_fill)


def _sizes(chain: Augmentation, height: int, width: int) -> list[tuple[int, int]]:
    """Height and width before every step, and after the last."""
    sizes = [(height, width)]
    for name, value in chain.steps:
        sizes.append((int(value), int(value)) if name == "window" else sizes[-1])
    return sizes


def _gather(x: Tensor, mask: Tensor | None, key: Tensor, chain: Augmentation, mask_fill: int) -> tuple[Tensor, Tensor]:
    empty = torch.empty(0)
    if not chain.steps:
        return x, empty if mask is None else mask
    batch, _, height, width = x.shape
    key = key.to(x.device)
    sizes = _sizes(chain, height, width)
    out_height, out_width = sizes[-1]
    rows = torch.arange(out_height, device=x.device).view(1, -1, 1)
    columns = torch.arange(out_width, device=x.device).view(1, 1, -1)
    inside = torch.ones((), dtype=torch.bool, device=x.device)
    for place in reversed(range(len(chain.steps))):
        name, value = chain.steps[place]
        high, wide = sizes[place]
        step_key = rng.key(key, name, place)
        rows, columns = OPERATIONS[name].map_back((rows, columns), step_key, batch, high, wide, value)
        inside = inside & (rows >= 0) & (rows < high) & (columns >= 0) & (columns < wide)
    source = rows.clamp(0, height - 1) * width + columns.clamp(0, width - 1)
    source = source.expand(batch, out_height, out_width).reshape(batch, -1)
    inside = inside.expand(batch, out_height, out_width)

    def take(values: Tensor, fill: int) -> Tensor:
        planes = values.reshape(batch, -1, height * width)
        index = source[:, None].expand(-1, planes.shape[1], -1)
        taken = planes.gather(2, index).reshape(batch, -1, out_height, out_width)
        return torch.where(inside[:, None], taken, torch.full((), fill, dtype=values.dtype, device=values.device))

    images = take(x, 0)
    return images, empty if mask is None else take(mask[:, None], mask_fill)[:, 0]
