"""Which part of a model is its head: what turns features into outputs, and may learn at a rate of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from torch import nn

from fednorm.core.state import Entry, entries


def last_layer(model: nn.Module, listing: Iterable[Entry]) -> frozenset[str]:
    """Keys of the last linear layer, or of the last convolution where there is none (segmentation heads)."""
    for types in ((nn.Linear,), (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        layers = [layer for layer, module in _modules(model) if isinstance(module, types)]
        if layers:
            return frozenset(entry.key for entry in listing if entry.layer == layers[-1])
    return frozenset()


def head(model: nn.Module) -> frozenset[str]:
    """Keys of all that is trained outside the backbone, where the model declares one, else of its last layer.

    A model declares its backbone by an attribute of that name which holds a module, as DeepLab's do.
    """
    listing = [entry for entry in entries(model) if entry.trainable]
    declared = (getattr(module, "backbone", None) for module in model.modules())
    backbone = next((module for module in declared if isinstance(module, nn.Module)), None)
    if backbone is None:
        return last_layer(model, listing)
    inside = {id(module) for module in backbone.modules()}
    outside = {layer for layer, module in _modules(model) if id(module) not in inside}
    return frozenset(entry.key for entry in listing if entry.layer in outside)


def _modules(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    return cast(Iterable[tuple[str, nn.Module]], model.named_modules())
