"""One example as a user's data set gives it, an (x, y) pair or a dict with named columns, as two tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fednorm.errors import ConfigError

INPUT_COLUMNS = ("image", "img", "pixel_values", "input_ids", "input", "inputs", "x", "features", "data")
TARGET_COLUMNS = ("label", "labels", "target", "targets", "y", "class", "mask")
"""What columns are usually called; where exactly one of each is there, it need not be said which."""

Columns = tuple[str, str]

_CHANNELS = (1, 3, 4)
_AS_BYTES = {"1": "L", "LA": "L", "P": "RGB", "PA": "RGB", "RGBA": "RGB", "CMYK": "RGB", "YCbCr": "RGB"}
"""Modes of PIL images that are converted first; all others are arrays of numbers already."""


def kind_of(dtype: torch.dtype) -> str:
    """How numbers of this type are understood: as bytes of images, as measurements or as whole numbers."""
    if dtype == torch.uint8:
        return "bytes"
    return "floats" if dtype.is_floating_point else "whole numbers"


def name_of(dtype: torch.dtype) -> str:
    """The name of a type of numbers.

    >>> name_of(torch.uint8), kind_of(torch.uint8)
    ('uint8', 'bytes')
    """
    return str(dtype).removeprefix("torch.")


def pair(item: Any, columns: Columns | None) -> tuple[Any, Any]:
    """Input and target of an item, raw.

    >>> pair({"img": 1, "label": 2}, None), pair((1, 2), None), pair({"a": 1, "b": 2}, ("b", "a"))
    ((1, 2), (1, 2), (2, 1))
    """
    if isinstance(item, Mapping):
        named = cast("Mapping[str, Any]", item)
        x, y = columns or find_columns(list(named))
        for column in (x, y):
            if column not in named:
                raise ConfigError(f"there is no column '{column}', only {_listed(named)}; give columns=(input, target)")
        return named[x], named[y]
    if isinstance(item, tuple | list) and len(cast("Sequence[Any]", item)) == 2:
        x, y = cast("Sequence[Any]", item)
        return x, y
    what = type(item).__name__
    if isinstance(item, tuple | list):
        what = f"a {what} of {len(cast('Sequence[Any]', item))}"
    raise ConfigError(f"it is {what}; expected an (x, y) pair, or a dict with named columns")


def find_columns(names: Sequence[str]) -> Columns:
    """The columns of inputs and targets by their usual names, where there is one of each."""
    inputs = [name for name in names if name in INPUT_COLUMNS]
    targets = [name for name in names if name in TARGET_COLUMNS]
    if len(inputs) == 1 and len(targets) == 1:
        return inputs[0], targets[0]
    raise ConfigError(
        f"which of the columns {_listed(names)} are input and target is not clear; "
        "give columns=(input, target), such as columns=('image', 'label')"
    )


def _listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"


def as_input(value: Any) -> Tensor:
    """An input as a tensor; an image becomes bytes (C, H, W)."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, str | bytes):
        shown = value if isinstance(value, str) else "bytes"
        fix = "turn text into token numbers first, such as tokenizer(text)['input_ids']"
        raise ConfigError(f"the input is text ({shown[:20]!r}); {fix}")
    found = as_tensor(value, "the input")
    return channels_first(found, of_items=False) if isinstance(value, np.ndarray) or _is_picture(value) else found


def as_target(value: Any) -> Tensor:
    """A target as a tensor: a number, a row of numbers, or a mask."""
    if isinstance(value, str | bytes):
        raise ConfigError(f"the label is text ({value!r}); number the classes from 0, such as names.index(label)")
    return value if isinstance(value, Tensor) else as_tensor(value, "the label")


def _is_picture(value: Any) -> bool:
    """Whether this is an image of PIL, which need not be there to find out."""
    return hasattr(value, "mode") and hasattr(value, "convert") and hasattr(value, "getbands")


def as_tensor(value: Any, what: str) -> Tensor:
    """Numbers of any kind as a tensor."""
    if isinstance(value, Tensor):
        return value
    if _is_picture(value):
        value = value.convert(_AS_BYTES[value.mode]) if value.mode in _AS_BYTES else value
    try:
        array = np.asarray(value)
        if array.dtype == object or array.dtype.kind in "USmM":
            raise TypeError(f"{array.dtype} is no type of numbers")
        if array.dtype == np.float64 and not isinstance(value, np.ndarray | np.generic):
            array = array.astype(np.float32)  # a Python number has no width of its own; torch's own default
        if not array.flags.writeable or any(stride < 0 for stride in array.strides):
            array = array.copy()
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} is {type(value).__name__}, which is no array of numbers ({error})") from error


def channels_first(x: Tensor, *, of_items: bool) -> Tensor:
    """Bytes of images that numpy and PIL hold as (H, W, C) or (H, W), as (C, H, W); other numbers as they are.

    `of_items` says that the first axis counts examples.

    >>> channels_first(torch.zeros(8, 9, 3, dtype=torch.uint8), of_items=False).shape
    torch.Size([3, 8, 9])
    """
    axes = x.dim() - of_items
    if x.dtype != torch.uint8 or axes not in (2, 3):
        return x
    if axes == 2:
        return x.unsqueeze(-3)
    is_last = x.shape[-1] in _CHANNELS and x.shape[-3] not in _CHANNELS
    return x.movedim(-1, -3).contiguous() if is_last else x
