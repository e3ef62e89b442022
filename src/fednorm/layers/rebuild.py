"""Rebuilding a layer as another class on the same tensors."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from fednorm.errors import ConfigError

Conv = TypeVar("Conv", bound=nn.Conv2d)
Linear = TypeVar("Linear", bound=nn.Linear)


def rebuild_conv(cls: type[Conv], old: nn.Conv2d, **options: Any) -> Conv:
    """A convolution of the class `cls` with the settings, weight, bias and mode of the old one."""
    with torch.device("meta"):  # the weights drawn here are thrown away; on meta they cost no random numbers
        new = cls(
            old.in_channels,
            old.out_channels,
            old.kernel_size,  # pyright: ignore[reportArgumentType]
            old.stride,  # pyright: ignore[reportArgumentType]
            old.padding,  # pyright: ignore[reportArgumentType]
            old.dilation,  # pyright: ignore[reportArgumentType]
            old.groups,
            bias=False,
            padding_mode=old.padding_mode,  # pyright: ignore[reportArgumentType]
            **options,
        )
    new.weight, new.bias = old.weight, old.bias
    return new.train(old.training)


def rebuild_linear(cls: type[Linear], old: nn.Linear) -> Linear:
    """A linear layer of the class `cls` with the weight, bias and mode of the old one."""
    with torch.device("meta"):
        new = cls(old.in_features, old.out_features, bias=False)
    new.weight, new.bias = old.weight, old.bias
    return new.train(old.training)


def refuse_special_conv(name: str, conv: nn.Conv2d) -> None:
    """A convolution that computes something of its own cannot be rebuilt from its settings."""
    if isinstance(conv, LazyModuleMixin):
        raise ConfigError(f"layer '{name}' has no shape yet (a lazy module); run one forward pass before surgery")
    if type(conv).forward is not nn.Conv2d.forward or parametrize.is_parametrized(conv):
        raise ConfigError(
            f"layer '{name}' ({type(conv).__name__}) is a convolution with a forward or a weight of its own, which "
            "surgery would lose; use a plain nn.Conv2d there"
        )
