"""A piece of a method in words: from the name of its class and its fields, or from the name of a function."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Any


def describe_piece(piece: Any) -> str:
    """What a piece is, with its settings.

    >>> from fednorm.core.report import BySize
    >>> from fednorm.pieces.weights import ByLoss
    >>> describe_piece(BySize()), describe_piece(ByLoss("all"))
    ('by size', 'by loss (which=all)')
    """
    if isinstance(piece, partial):
        return describe_piece(piece.func)
    if not is_dataclass(piece) or isinstance(piece, type):
        return getattr(piece, "__name__", type(piece).__name__).strip("<>").replace("_", " ").strip()
    settings = [f"{each.name}={_value(getattr(piece, each.name))}" for each in fields(piece) if each.repr]
    return _in_words(type(piece).__name__) + (f" ({', '.join(settings)})" if settings else "")


def explain_piece(piece: Any) -> str:
    """What a piece does: the first sentence of its docstring, or nothing.

    >>> from fednorm.core.merge import Maximum
    >>> explain_piece(Maximum())
    'Element-wise maximum, for counters: no order, no weights, no change of type.'
    """
    return (inspect.getdoc(piece.func if isinstance(piece, partial) else piece) or "").partition("\n")[0]


def _in_words(name: str) -> str:
    """A class name as words: `ToHybridBN` is `to hybrid BN`."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*", name.strip("_"))
    return " ".join(word if len(word) > 1 and word.isupper() else word.lower() for word in words) or name


def _value(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_value(name)}: {_value(each)}" for name, each in value.items()) + "}"
    return describe_piece(value) if is_dataclass(value) or callable(value) else str(value)
