"""Local optimizers as pure functions of trees; their state is ordinary state with the kind `optimizer`.

They follow torch.optim's SGD and Adam to the formula, so that a user's own loop and ours agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fednorm.core.state import Entry, Kind, Tree
from fednorm.errors import unknown

if TYPE_CHECKING:
    from fednorm.core.method import Numbers

Factors = Mapping[str, float]


@dataclass(frozen=True)
class Optimizer:
    """`buffers` names the tensors kept per parameter; `update` maps (params, grads, buffers, ...) to new ones."""

    name: str
    buffers: tuple[str, ...]
    update: Callable[[Tree, Tree, Tree, Numbers, Factors, frozenset[str]], tuple[Tree, Tree]]

    def entries(self, parameters: Iterable[Entry]) -> tuple[Entry, ...]:
        """The optimizer's own entries for some parameters."""
        return tuple(
            Entry(buffer_key(part, p.key), Kind.OPTIMIZER, buffer_key(part, p.key), part, False, p.shape, p.dtype)
            for p in parameters
            for part in self.buffers
        )


def buffer_key(part: str, key: str) -> str:
    """The key of an optimizer buffer.

    >>> buffer_key("momentum", "conv1.weight")
    'momentum:conv1.weight'
    """
    return f"{part}:{key}"


Keys = frozenset[str]
"""Keys of parameters that weight decay leaves alone."""


def _sgd(
    params: Tree, grads: Tree, buffers: Tree, numbers: Numbers, factors: Factors, spared: Keys = frozenset()
) -> tuple[Tree, Tree]:
    lr, momentum, decay = numbers["lr"], numbers["momentum"], numbers["weight_decay"]
    new_params: Tree = {}
    new_buffers: Tree = {}
    for key, value in params.items():
        direction = grads[key] if key in spared else grads[key] + decay * value
        name = buffer_key("momentum", key)
        if name in buffers:
            direction = new_buffers[name] = momentum * buffers[name] + direction
        new_params[key] = value - (lr * factors[key] if key in factors else lr) * direction
    return new_params, buffers | new_buffers


def _adam(
    params: Tree, grads: Tree, buffers: Tree, numbers: Numbers, factors: Factors, spared: Keys = frozenset()
) -> tuple[Tree, Tree]:
    lr, decay, beta1, beta2 = numbers["lr"], numbers["weight_decay"], 0.9, 0.999
    new_params: Tree = {}
    new_buffers: Tree = {}
    for key, value in params.items():
        names = [buffer_key(part, key) for part in ("exp_avg", "exp_avg_sq", "step")]
        first, second, count = (buffers[name] for name in names)
        grad = grads[key] if key in spared else grads[key] + decay * value
        first, second, count = beta1 * first + (1 - beta1) * grad, beta2 * second + (1 - beta2) * grad**2, count + 1
        step_size = (lr * factors[key] if key in factors else lr) / (1 - beta1**count)
        new_params[key] = value - step_size * first / (torch.sqrt(second) / torch.sqrt(1 - beta2**count) + 1e-8)
        new_buffers |= dict(zip(names, (first, second, count), strict=True))
    return new_params, buffers | new_buffers


def joined(optimizer: Optimizer, channels_last: bool = False) -> Optimizer:
    """The same optimizer for all parameters at once: those with one rate and decay are one long vector to it.

    Updates work element by element, so nothing changes but the number of calls. With `channels_last`, filters are
    joined as they lie in memory.
    """

    def row(value: Tensor) -> Tensor:
        return (value.permute(0, 2, 3, 1) if channels_last and value.dim() == 4 else value).reshape(-1)

    def unrow(part: Tensor, like: Tensor) -> Tensor:
        if not (channels_last and like.dim() == 4):
            return part.reshape(like.shape)
        outs, ins, height, width = like.shape
        return part.reshape(outs, height, width, ins).permute(0, 3, 1, 2)

    def update(
        params: Tree, grads: Tree, buffers: Tree, numbers: Numbers, factors: Factors, spared: Keys = frozenset()
    ) -> tuple[Tree, Tree]:
        groups: dict[tuple[float | None, bool, torch.dtype], list[str]] = {}
        for key, value in params.items():
            groups.setdefault((factors.get(key), key in spared, value.dtype), []).append(key)
        new_params: Tree = {}
        new_buffers = dict(buffers)
        for (factor, bare, _), keys in groups.items():
            name, sizes = keys[0], [params[key].numel() for key in keys]
            kinds = [part for part in optimizer.buffers if buffer_key(part, name) in buffers]
            held = {part: [buffer_key(part, key) for key in keys] for part in kinds}
            moved, kept = optimizer.update(
                {name: torch.cat([row(params[key]) for key in keys])},
                {name: torch.cat([row(grads[key]) for key in keys])},
                {names[0]: torch.cat([row(buffers[key]) for key in names]) for names in held.values()},
                numbers,
                {} if factor is None else {name: factor},
                frozenset({name}) if bare else frozenset(),
            )
            pieces = zip(keys, moved[name].split_with_sizes(sizes), strict=True)
            new_params |= {key: unrow(piece, params[key]) for key, piece in pieces}
            for names in held.values():
                pieces = zip(keys, names, kept[names[0]].split_with_sizes(sizes), strict=True)
                new_buffers |= {buffer: unrow(piece, params[key]) for key, buffer, piece in pieces}
        return {key: new_params[key] for key in params}, new_buffers

    return replace(optimizer, update=update)


SGD = Optimizer("sgd", (), _sgd)
MOMENTUM_SGD = Optimizer("sgd", ("momentum",), _sgd)
# Adam's step is kept per element so that it has the shape of its parameter, as every other buffer.
ADAM = Optimizer("adam", ("exp_avg", "exp_avg_sq", "step"), _adam)


def optimizer(name: str, momentum: float) -> Optimizer:
    """The optimizer of a training configuration; SGD keeps a buffer only if there is momentum."""
    if name == "sgd":
        return MOMENTUM_SGD if momentum else SGD
    if name == "adam":
        return ADAM
    raise unknown("optimizer", name, ["sgd", "adam"])
