"""How far what a model's layers see of some images is from what they saw of a client's data."""

# Applying a Function has no useful type.
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from fednorm.core.state import Tree
from fednorm.layers.stat_tracker import StatTracker
from fednorm.strategies.revive.network import Network, Watched

_NOTHING = 1e-300
"""A squared distance that is none: roots have no slope at zero."""


@contextmanager
def seen_by(network: Network, watched: tuple[Watched, ...]) -> Iterator[dict[str, Tensor]]:
    """What enters these layers while the network runs, by name."""
    seen: dict[str, Tensor] = {}
    hooks = []
    for layer in (each.layer for each in watched):

        def note(module: nn.Module, args: tuple[Any, ...], layer: str = layer) -> None:
            seen[layer] = args[0]

        hooks.append(network.model.get_submodule(layer).register_forward_pre_hook(note))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def gap(network: Network, watched: tuple[Watched, ...], tree: Tree, seen: Mapping[str, Tensor]) -> Tensor:
    """How far the statistics of what layers see are from those a client has: sum of |mean - mean'| + |var - var'|."""
    like = next(iter(tree.values()))
    if not watched:
        return torch.zeros((), device=like.device)
    each = [moments(seen[layer], _axis(network.model.get_submodule(layer))) for layer, *_ in watched]
    spreads = [tree[key].square() if is_std else tree[key] for _, _, key, is_std in watched]
    own = torch.stack([torch.cat([tree[mean] for _, mean, _, _ in watched]), torch.cat(spreads)])
    # The layers lie side by side, so that few operations do for all of them.
    squares = (torch.cat(each, 1) - own).double().square()
    sums = squares @ _layers(tuple(part.shape[1] for part in each), like.device)
    return sums.clamp_min(_NOTHING).sqrt().sum().to(own.dtype)


def make_layers_known(watched: tuple[Watched, ...], tree: Tree, device: torch.device) -> None:
    """Make the table that `gap` reads where there are numbers: a program is written down on tensors without any."""
    if watched:
        _layers(tuple(tree[mean].numel() for _, mean, _, _ in watched), device)


def _axis(module: nn.Module) -> int:
    """Where the channels of what a layer sees are."""
    return module.axis if isinstance(module, StatTracker) else 1


@lru_cache(maxsize=16)
def _layers(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """(channel, layer): 1 where the channel is of the layer, in float64, whose products are exact."""
    layer = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return nn.functional.one_hot(layer).double().to(device)


def moments(inputs: Tensor, axis: int) -> Tensor:
    """(2, channel): mean and biased variance of each channel."""
    return cast(Any, _Moments.apply(inputs, axis % inputs.dim()))


class _Moments(torch.autograd.Function):
    """In one pass over the inputs, forward and backward; torch's own derivative takes six."""

    @staticmethod
    def forward(inputs: Tensor, axis: int) -> Tensor:
        return _mean_and_var(inputs, {axis}, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        images, ctx.axis = inputs
        ctx.save_for_backward(images, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        inputs, (mean, _) = ctx.saved_tensors[0], ctx.saved_tensors[1].detach()
        by_mean, by_var = grads[0] * (len(mean) / inputs.numel())
        shape = [-1 if each == ctx.axis else 1 for each in range(inputs.dim())]
        slope = 2 * by_var
        constant = torch.addcmul(by_mean, slope, mean, value=-1)
        return torch.addcmul(constant.view(shape), inputs, slope.view(shape)).to(inputs.dtype), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], inputs: Tensor, axis: int) -> tuple[Tensor, int]:
        return _mean_and_var(inputs.movedim(in_dims[0], 0), {0, axis + 1}, 1), 0


def _mean_and_var(inputs: Tensor, kept: set[int], at: int) -> Tensor:
    wide = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
    var, mean = torch.var_mean(wide, [each for each in range(inputs.dim()) if each not in kept], correction=0)
    return torch.stack([mean, var], at)
