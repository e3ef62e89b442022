"""Operators that torch has no rule to map: it plays them client by client, right but slowly, and a line names them."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

_TORCHS = r"There is a performance drop because we have not yet implemented the batching rule for ([\w:.]*\w)"
"""How torch's warning begins, with the operator's name."""
_NAMED: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""The operators that were named, by model."""


@contextmanager
def slow_operators_named(model: nn.Module) -> Iterator[None]:
    """Within, what torch warns of a mapped model's operators becomes one line, which names each of them once."""
    found: dict[str, None] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("always", _TORCHS)
        others = warnings.showwarning

        def show(message: Warning | str, *about: Any, **named: Any) -> None:
            if match := re.match(_TORCHS, str(message)):
                found[match[1]] = None
            else:
                others(message, *about, **named)

        warnings.showwarning = show
        yield
    known = _NAMED.setdefault(model, set())
    if new := [name for name in found if name not in known]:
        known.update(new)
        print(f"stacked engine: torch plays {', '.join(new)} client by client, which is slow", file=sys.stderr)
