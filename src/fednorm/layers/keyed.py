"""Layers whose random numbers are a pure function of a key that the caller passes in.

Torch's own random layers draw from a hidden generator: they cannot run under `torch.vmap`, and a restart or another
device changes their numbers. A keyed layer instead reads its buffer `key`, which `torch.func.functional_call` can
override for every step and, under `torch.vmap`, for every client.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from fednorm.core import rng


@lru_cache(maxsize=4096)
def _salt(index: int, call: int) -> int:
    # A plain integer: folding it into the key needs no copy from host to device, so CUDA graphs can capture the layer.
    return int(rng.key("layer", index, call).item())


class Keyed(nn.Module):
    """A layer that draws from (key, its index in the model, how often it ran in this forward pass)."""

    key: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)
        self.index = 0
        self.calls = 0

    def next_key(self) -> Tensor:
        """The key of this call; a layer used twice in one forward pass draws twice."""
        key = self.key ^ _salt(self.index, self.calls)
        self.calls += 1
        return key


def dropped(x: Tensor, key: Tensor, p: float, shape: Sequence[int]) -> Tensor:
    """x / (1 - p), and 0 where what the key (or each of several) draws for this shape is below p."""
    return torch.where(rng.uniform(key, shape) >= p, x / (1 - p), 0)


def mask_shape(x: Tensor, spatial: int) -> list[int]:
    """The shape of a dropout's mask: x's own, or with `spatial` axes one number for each of its channels."""
    if spatial == 0:
        return list(x.shape)
    # Torch reads (C, L) and (C, D, H, W) as one sample, but three axes in Dropout2d as a batch (N, C, L).
    leading = 1 if x.dim() == spatial + 1 and spatial != 2 else 2
    return [*x.shape[:leading], *[1] * (x.dim() - leading)]


class KeyedDropout(Keyed):
    """Dropout with a keyed mask: y = x * (u >= p) / (1 - p), u uniform in [0, 1).

    `spatial` is 0 for element-wise dropout and 1, 2, 3 for the layers that drop whole channels.
    """

    def __init__(self, p: float = 0.5, spatial: int = 0) -> None:
        super().__init__()
        self.p = p
        self.spatial = spatial

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        return dropped(x, self.next_key(), self.p, mask_shape(x, self.spatial)) if self.p < 1 else x * 0

    def extra_repr(self) -> str:
        return f"p={self.p}, spatial={self.spatial}"


def _restart_calls(model: nn.Module, args: object) -> None:
    for module in model.modules():
        if isinstance(module, Keyed):
            module.calls = 0


def number_keyed_layers(model: nn.Module) -> None:
    """Give every keyed layer its own index and restart the counts of calls whenever the model runs."""
    layers = [module for module in model.modules() if isinstance(module, Keyed)]
    for index, layer in enumerate(layers):
        layer.index = index
    if layers and _restart_calls not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_restart_calls)


def key_names(model: nn.Module) -> list[str]:
    """Names of the key buffers to override in `functional_call`; all may be given the same key.

    >>> key_names(nn.Sequential(nn.Linear(2, 2), KeyedDropout()))
    ['1.key']
    """
    return [f"{name}.key" if name else "key" for name, module in model.named_modules() if isinstance(module, Keyed)]
