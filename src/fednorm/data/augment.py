"""Augmentation on tensors: one gather for a whole batch, drawn from a key, equal on CPU, on CUDA and under vmap.

Most operations are maps from output pixels to source pixels in whole numbers, so a chain of them is still one gather
and no device can round differently. Pixels from outside the image are 0 (black), mask pixels `mask_fill`. A crop that
is brought back to the old size mixes pixels, in whole numbers too, and stands between such chains.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from fednorm.core import rng
from fednorm.data.augment_steps import OPERATIONS, Operation, Parameter, Values, crop_of
from fednorm.data.resample import cropped_bilinear, cropped_nearest
from fednorm.errors import ConfigError, unknown


@dataclass(frozen=True)
class Augmentation:
    """A parsed chain: operation names with their parameters, first to last."""

    steps: tuple[tuple[str, Values], ...]

    def __str__(self) -> str:
        return "+".join(f"{name}({','.join(map(_shown, values))})" for name, values in self.steps) or "none"


def _shown(value: float) -> str:
    """A number as it can be read again."""
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


def parse(spec: str | Augmentation) -> Augmentation:
    """A chain from text such as "none", "flip", "crop(2)+flip" or "resized_crop(low=0.2)".

    >>> str(parse("crop(2) + flip")), str(parse("resized_crop(0.2,ratio=1)"))
    ('crop(2)+flip(0.5)', 'resized_crop(0.2,1,1)')
    """
    if isinstance(spec, Augmentation):
        return spec
    text = spec.replace(" ", "")
    if text in ("", "none"):
        return Augmentation(())
    return Augmentation(tuple(_parse_step(step, spec) for step in text.split("+")))


def _parse_step(step: str, spec: str) -> tuple[str, Values]:
    match = re.fullmatch(r"([a-z_]+)(?:\(([^()]*)\))?", step)
    if match is None:
        raise ConfigError(f"augmentation '{spec}' cannot be read at '{step}'; write it like crop(2)+flip, or none")
    name, arguments = match.groups()
    if name not in OPERATIONS:
        raise unknown("augmentation", name, [*OPERATIONS, "none"])
    told = _by_name(name, OPERATIONS[name], arguments or "")
    values = {each.name: _number(name, each, told.get(each.name)) for each in OPERATIONS[name].parameters}
    if values.get("low", 0) > values.get("high", 1):
        raise ConfigError(
            f"augmentation '{name}': low={_shown(values['low'])} is above high={_shown(values['high'])}; "
            "give low up to high"
        )
    return name, tuple(values.values())


def _by_name(name: str, operation: Operation, arguments: str) -> dict[str, str]:
    """What is told of each parameter, by its place or as name=value."""
    names = [each.name for each in operation.parameters]
    told: dict[str, str] = {}
    for place, argument in enumerate(arguments.split(",") if arguments else ()):
        option, given, text = argument.rpartition("=")
        if not given:
            if place >= len(names):
                raise ConfigError(f"augmentation '{name}' takes {', '.join(names)} and no more, not '{argument}'")
            option = names[place]
        if option not in names:
            raise unknown(f"option of augmentation '{name}'", option, names)
        told[option] = text
    return told


def _number(name: str, parameter: Parameter, told: str | None) -> float:
    if told is None:
        if parameter.default is None:
            raise ConfigError(f"augmentation '{name}' needs its {parameter.name}, as in {name}({parameter.low + 3:g})")
        return float(parameter.default)
    try:
        value = float(told)
    except ValueError:
        value = math.nan
    whole = parameter.default is None
    if not parameter.low <= value <= parameter.high or (whole and value != int(value)):
        numbers = "a whole number" if whole else "a number"
        raise ConfigError(
            f"augmentation '{name}': {parameter.name} must be {numbers} from {parameter.low:g} to {parameter.high:g}, "
            f"not '{told}'"
        )
    return value


def augment(x: Tensor, key: Tensor, spec: str | Augmentation) -> Tensor:
    """Augment a batch (B, C, H, W) of any dtype; `key` is one 64-bit key from `fednorm.core.rng`.

    >>> x = torch.arange(8, dtype=torch.uint8).reshape(2, 1, 2, 2)
    >>> augment(x, rng.key(0), "flip(1)").flatten().tolist()
    [1, 0, 3, 2, 5, 4, 7, 6]
    """
    chain = parse(spec)
    return apply(x, None, draws(key, x.shape, chain).to(x.device), chain)[0] if chain.steps else x


def augment_with_mask(
    x: Tensor, mask: Tensor, key: Tensor, spec: str | Augmentation, mask_fill: int = 255
) -> tuple[Tensor, Tensor]:
    """Augment images (B, C, H, W) and their masks (B, H, W) in the same way."""
    chain = parse(spec)
    return apply(x, mask, draws(key, x.shape, chain).to(x.device), chain, mask_fill) if chain.steps else (x, mask)


def sizes(chain: Augmentation, height: int, width: int) -> list[tuple[int, int]]:
    """Height and width before every step, and after the last."""
    found = [(height, width)]
    for name, values in chain.steps:
        found.append((int(values[0]), int(values[0])) if name == "window" else found[-1])
    return found


def draws(key: Tensor, shape: Sequence[int], chain: Augmentation) -> Tensor:
    """All that is random about the augmentation of a batch of this shape: two whole numbers a step, (B, steps, 2)."""
    batch, height, width = shape[0], shape[-2], shape[-1]
    before = sizes(chain, height, width)
    drawn = [
        OPERATIONS[name].draw(rng.key(key, name, step), batch, *before[step], values)
        for step, (name, values) in enumerate(chain.steps)
    ]
    return torch.stack(drawn, 1)


def apply(
    x: Tensor, mask: Tensor | None, drawn: Tensor, chain: Augmentation, mask_fill: int = 255
) -> tuple[Tensor, Tensor]:
    """Images (B, C, H, W), and their masks if given, changed as the drawn numbers say."""
    layers = None if mask is None else mask[:, None]
    numbered = enumerate(chain.steps)
    for resamples, group in groupby(numbered, lambda each: OPERATIONS[each[1][0]].resamples):
        steps = [number for number, _ in group]
        if not resamples:
            part = Augmentation(chain.steps[steps[0] : steps[-1] + 1])
            x, layers = _moved(x, layers, drawn[:, steps[0] : steps[-1] + 1], part, mask_fill)
            continue
        for step in steps:
            top, height = crop_of(drawn[:, step, 0])
            left, width = crop_of(drawn[:, step, 1])
            x = cropped_bilinear(x, top, height, left, width)
            layers = None if layers is None else cropped_nearest(layers, top, height, left, width)
    return x, torch.empty(0) if layers is None else layers[:, 0]


def _moved(
    x: Tensor, layers: Tensor | None, drawn: Tensor, chain: Augmentation, mask_fill: int
) -> tuple[Tensor, Tensor | None]:
    """Images, and masks with a channel, whose pixels a chain of operations moves: one gather."""
    batch, _, height, width = x.shape
    before = sizes(chain, height, width)
    out_height, out_width = before[-1]
    rows = torch.arange(out_height, device=x.device).view(1, -1, 1)
    columns = torch.arange(out_width, device=x.device).view(1, 1, -1)
    inside = torch.ones((), dtype=torch.bool, device=x.device)
    for step in reversed(range(len(chain.steps))):
        name, (high, wide) = chain.steps[step][0], before[step]
        first, second = (drawn[:, step, which].view(batch, 1, 1) for which in (0, 1))
        rows, columns = OPERATIONS[name].map_back((rows, columns), (first, second), high, wide)
        inside = inside & (rows >= 0) & (rows < high) & (columns >= 0) & (columns < wide)
    source = rows.clamp(0, height - 1) * width + columns.clamp(0, width - 1)
    source = source.expand(batch, out_height, out_width).reshape(batch, -1)
    inside = inside.expand(batch, out_height, out_width)

    def take(values: Tensor, fill: int) -> Tensor:
        planes = values.reshape(batch, -1, height * width)
        index = source[:, None].expand(-1, planes.shape[1], -1)
        taken = planes.gather(2, index).reshape(batch, -1, out_height, out_width)
        return torch.where(inside[:, None], taken, torch.full((), fill, dtype=values.dtype, device=values.device))

    return take(x, 0), None if layers is None else take(layers, mask_fill)
