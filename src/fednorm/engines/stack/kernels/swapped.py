"""Layers that took the place of torch's own, and the way back, where they cannot serve a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


class Swapped:
    """A layer in the place of its first base; with `dense` it hands on what lies in memory as torch's own would.

    `narrow` is the type that it rounds its inputs to, where it does.
    """

    __slots__ = ()
    dense = False
    narrow: torch.dtype | None = None


def has_swapped(model: nn.Module) -> bool:
    """Whether some layers of a model are not torch's own."""
    return any(isinstance(module, Swapped) for module in model.modules())


def restore(model: nn.Module) -> Sequence[tuple[nn.Module, type[nn.Module]]]:
    """Put torch's own layers back; returns which layers had been what."""
    swapped = [(module, type(module)) for module in model.modules() if isinstance(module, Swapped)]
    for module, kind in swapped:
        module.__class__ = kind.__bases__[0]
    return swapped


@contextmanager
def torchs_own(model: nn.Module) -> Iterator[None]:
    """Torch's own layers, for a while."""
    swapped = restore(model)
    try:
        yield
    finally:
        for module, kind in swapped:
            module.__class__ = kind


@contextmanager
def dense(model: nn.Module) -> Iterator[None]:
    """Layers whose outputs lie in memory as torch's own, for a while; it takes a copy behind each."""
    before = [(module, module.dense) for module in model.modules() if isinstance(module, Swapped)]
    for module, _ in before:
        module.dense = True
    try:
        yield
    finally:
        for module, was in before:
            module.dense = was
