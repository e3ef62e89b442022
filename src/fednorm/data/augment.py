"""Augmentation on tensors: one gather for a whole batch, drawn from a key, equal on CPU, on CUDA and under vmap.

Every operation is a map from output pixels to source pixels in whole numbers, so a chain of them is still one gather
and no device can round differently. Pixels from outside the image are 0 (black), mask pixels `mask_fill`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fednorm.core import rng
from fednorm.errors import ConfigError, unknown

Coordinates = tuple[Tensor, Tensor]
"""Source rows and columns, broadcastable to (B, H, W)."""
Draw = Callable[[Tensor, int, int, int, float], Tensor]
"""(key, batch, height and width of the input, parameter) -> two whole numbers for each image, (batch, 2)."""
MapBack = Callable[[Coordinates, Coordinates, int, int, float], Coordinates]
"""(coordinates in the output, drawn numbers, height and width of the input, parameter) -> coordinates in the input."""

_ANGLES = 4096
_FRACTION = 16


def _draw_crop(key: Tensor, batch: int, height: int, width: int, pad: float) -> Tensor:
    return (rng.integers(key, 2 * int(pad) + 1, (2, batch)) - int(pad)).T


def _shift(at: Coordinates, drawn: Coordinates, height: int, width: int, _: float) -> Coordinates:
    return at[0] + drawn[0], at[1] + drawn[1]


def _draw_flip(key: Tensor, batch: int, height: int, width: int, chance: float) -> Tensor:
    return (rng.uniform(key, (batch, 1)) < chance).to(torch.int64).expand(batch, 2)


def _flip(at: Coordinates, drawn: Coordinates, height: int, width: int, _: float) -> Coordinates:
    return at[0], torch.where(drawn[0] > 0, width - 1 - at[1], at[1])


@lru_cache(maxsize=8)
def _turns(degrees: float) -> tuple[tuple[int, int], ...]:
    """Cosine and sine of angles from -degrees to degrees in fixed point: devices differ in the last bit of a cosine."""
    angles = (math.radians(degrees) * (2 * i / (_ANGLES - 1) - 1) for i in range(_ANGLES))
    one = 1 << _FRACTION
    return tuple((round(one * math.cos(angle)), round(one * math.sin(angle))) for angle in angles)


def _draw_rotation(key: Tensor, batch: int, height: int, width: int, degrees: float) -> Tensor:
    table = torch.tensor(_turns(degrees), device=key.device)
    return table[rng.integers(key, _ANGLES, (batch,))]


def _rotate(at: Coordinates, drawn: Coordinates, height: int, width: int, _: float) -> Coordinates:
    cos, sin = drawn
    # Twice the distance from the centre, so that the centre of an even image is a whole number too.
    dy, dx = 2 * at[0] - (height - 1), 2 * at[1] - (width - 1)
    y, x = cos * dy - sin * dx, sin * dy + cos * dx
    return tuple((value + (size << _FRACTION)) >> (_FRACTION + 1) for value, size in ((y, height), (x, width)))  # type: ignore[return-value]


def _draw_window(key: Tensor, batch: int, height: int, width: int, size: float) -> Tensor:
    rows = rng.integers(rng.key(key, 0), max(height - int(size), 0) + 1, (batch,))
    columns = rng.integers(rng.key(key, 1), max(width - int(size), 0) + 1, (batch,))
    return torch.stack([rows, columns], 1)


@dataclass(frozen=True)
class _Kind:
    draw: Draw
    map_back: MapBack
    parameter: str
    default: float | None
    low: float
    high: float
    summary: str


OPERATIONS: dict[str, _Kind] = {
    "crop": _Kind(_draw_crop, _shift, "pixels", None, 1, 512, "pad with black, then cut the old size at random"),
    "flip": _Kind(_draw_flip, _flip, "chance", 0.5, 0, 1, "mirror left and right"),
    "rotate": _Kind(_draw_rotation, _rotate, "degrees", 30, 0, 180, "turn by up to this many degrees, nearest pixel"),
    "window": _Kind(_draw_window, _shift, "size", None, 1, 65536, "cut a square of this size at random"),
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
    """Augment a batch (B, C, H, W) of any dtype; `key` is one 64-bit key from `fednorm.core.rng`.

    >>> x = torch.arange(8, dtype=torch.uint8).reshape(2, 1, 2, 2)
    >>> augment(x, rng.key(0), "flip(1)").flatten().tolist()
    [1, 0, 3, 2, 5, 4, 7, 6]
    """
    chain = parse(spec)
    return apply(x, None, draws(key.to(x.device), x.shape, chain), chain)[0] if chain.steps else x


def augment_with_mask(
    x: Tensor, mask: Tensor, key: Tensor, spec: str | Augmentation, mask_fill: int = 255
) -> tuple[Tensor, Tensor]:
    """Augment images (B, C, H, W) and their masks (B, H, W) in the same way."""
    chain = parse(spec)
    return apply(x, mask, draws(key.to(x.device), x.shape, chain), chain, mask_fill) if chain.steps else (x, mask)


def sizes(chain: Augmentation, height: int, width: int) -> list[tuple[int, int]]:
    """Height and width before every step, and after the last."""
    found = [(height, width)]
    for name, value in chain.steps:
        found.append((int(value), int(value)) if name == "window" else found[-1])
    return found


def draws(key: Tensor, shape: Sequence[int], chain: Augmentation) -> Tensor:
    """All that is random about the augmentation of a batch of this shape: two whole numbers a step, (B, steps, 2)."""
    batch, height, width = shape[0], shape[-2], shape[-1]
    before = sizes(chain, height, width)
    drawn = [
        OPERATIONS[name].draw(rng.key(key, name, step), batch, *before[step], value)
        for step, (name, value) in enumerate(chain.steps)
    ]
    return torch.stack(drawn, 1)


def apply(
    x: Tensor, mask: Tensor | None, drawn: Tensor, chain: Augmentation, mask_fill: int = 255
) -> tuple[Tensor, Tensor]:
    """Images (B, C, H, W), and their masks if given, moved as the drawn numbers say."""
    empty = torch.empty(0)
    batch, _, height, width = x.shape
    before = sizes(chain, height, width)
    out_height, out_width = before[-1]
    rows = torch.arange(out_height, device=x.device).view(1, -1, 1)
    columns = torch.arange(out_width, device=x.device).view(1, 1, -1)
    inside = torch.ones((), dtype=torch.bool, device=x.device)
    for step in reversed(range(len(chain.steps))):
        name, value = chain.steps[step]
        high, wide = before[step]
        first, second = (drawn[:, step, which].view(batch, 1, 1) for which in (0, 1))
        rows, columns = OPERATIONS[name].map_back((rows, columns), (first, second), high, wide, value)
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
