"""Local optimizers as pure functions; their state is ordinary state with the kind `optimizer`.

An optimizer is how one tensor moves. `optimizers.py` has those there are, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from fednorm.core.state import Entry, Kind, Tree
from fednorm.errors import ConfigError

if TYPE_CHECKING:
    from fednorm.core.method import Numbers

Factors = Mapping[str, float]
Keys = frozenset[str]
"""Keys of parameters that weight decay leaves alone."""

Update = Callable[[Tensor, Tensor, Tree, "Numbers"], tuple[Tensor, Tree]]
"""(value, gradient, buffers by name, numbers) -> (new value, new buffers).

The numbers are `lr`, `momentum` and `weight_decay`, as they are for this tensor in this round. They may be tensors, and
one call may be mapped over many clients: compute with them, but never ask `if` of them, and change nothing in place.
"""

Lists = Mapping[str, list[Tensor]]
Together = Callable[[list[Tensor], list[Tensor], Lists, "Numbers"], tuple[list[Tensor], Lists]]
"""The same for several tensors with equal numbers, in fewer calls; the bits must be those of `update`."""


@dataclass(frozen=True)
class Optimizer:
    """How a tensor moves. `buffers` names what is kept beside it, tensors of its shape that begin as zeros.

    >>> signs = Optimizer(lambda value, grad, buffers, numbers: (value - numbers["lr"] * grad.sign(), buffers))
    >>> signs.step({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, -3.0])}, {}, {"lr": 0.5}, {})[0]["w"]
    tensor([0.5000, 2.5000])
    """

    update: Update
    buffers: tuple[str, ...] = ()
    name: str = "own"
    elementwise: bool = True
    """whether an element moves by itself; if not (a norm of the whole tensor), tensors are never joined to one"""

    @property
    def together(self) -> Together | None:
        """How several tensors move at once, where the update itself knows a way with the same bits."""
        return getattr(self.update, "together", None)

    def entries(self, parameters: Iterable[Entry]) -> tuple[Entry, ...]:
        """The optimizer's own entries for some parameters."""
        return tuple(
            Entry(buffer_key(part, p.key), Kind.OPTIMIZER, buffer_key(part, p.key), part, False, p.shape, p.dtype)
            for p in parameters
            for part in self.buffers
        )

    def step(
        self, params: Tree, grads: Tree, buffers: Tree, numbers: Numbers, factors: Factors, spared: Keys = frozenset()
    ) -> tuple[Tree, Tree]:
        """Move all parameters; `factors` are on the learning rate of some, `spared` from weight decay are others."""
        new_params: Tree = {}
        new_buffers = dict(buffers)
        for key, value in params.items():
            own = _own_numbers(numbers, factors.get(key), key in spared)
            held = {part: buffers[buffer_key(part, key)] for part in self.buffers}
            new_params[key], moved = self.update(value, grads[key], held, own)
            if moved.keys() != held.keys():
                raise ConfigError(
                    f"optimizer '{self.name}' returned the buffers {sorted(moved)}, expected {sorted(held)}; "
                    "name all of them in Optimizer(buffers=...)"
                )
            for part, moved_buffer in moved.items():
                new_buffers[buffer_key(part, key)] = moved_buffer
        return new_params, new_buffers


def _own_numbers(numbers: Numbers, factor: float | None, spared: bool) -> Numbers:
    """The numbers of tensors with a factor on their rate, or that decay spares."""
    if factor is not None:
        numbers = {**numbers, "lr": numbers["lr"] * factor}
    return {**numbers, "weight_decay": 0.0 * numbers["weight_decay"]} if spared else numbers


class Stepping(Protocol):
    """What a step of training asks an optimizer for."""

    def step(
        self, params: Tree, grads: Tree, buffers: Tree, numbers: Numbers, factors: Factors, spared: Keys = ...
    ) -> tuple[Tree, Tree]: ...


def buffer_key(part: str, key: str) -> str:
    """The key of an optimizer buffer.

    >>> buffer_key("momentum", "conv1.weight")
    'momentum:conv1.weight'
    """
    return f"{part}:{key}"


@dataclass(frozen=True)
class Grouped:
    """An optimizer that moves all parameters with one rate and decay in a few calls, to the bit as one by one."""

    together: Together
    buffers: tuple[str, ...]

    def step(
        self, params: Tree, grads: Tree, buffers: Tree, numbers: Numbers, factors: Factors, spared: Keys = frozenset()
    ) -> tuple[Tree, Tree]:
        """Move all parameters."""
        groups: dict[tuple[float | None, bool], list[str]] = {}
        for key in params:
            groups.setdefault((factors.get(key), key in spared), []).append(key)
        new_params: Tree = dict(params)
        new_buffers = dict(buffers)
        for (factor, bare), keys in groups.items():
            held = {part: [buffers[buffer_key(part, key)] for key in keys] for part in self.buffers}
            values, gradients = [params[key] for key in keys], [grads[key] for key in keys]
            moved, kept = self.together(values, gradients, held, _own_numbers(numbers, factor, bare))
            new_params.update(zip(keys, moved, strict=True))
            for part, tensors in kept.items():
                new_buffers.update(zip((buffer_key(part, key) for key in keys), tensors, strict=True))
        return new_params, new_buffers


@dataclass(frozen=True)
class Joined:
    """An element-wise optimizer for all parameters at once: those with one rate and decay are one long vector to it.

    Nothing changes but the number of calls. With `channels_last`, filters are joined as they lie in memory.
    """

    optimizer: Optimizer
    channels_last: bool = False

    def step(
        self, params: Tree, grads: Tree, buffers: Tree, numbers: Numbers, factors: Factors, spared: Keys = frozenset()
    ) -> tuple[Tree, Tree]:
        """Move all parameters."""
        groups: dict[tuple[float | None, bool, torch.dtype], list[str]] = {}
        for key, value in params.items():
            groups.setdefault((factors.get(key), key in spared, value.dtype), []).append(key)
        new_params: Tree = {}
        new_buffers = dict(buffers)
        for (factor, bare, _), keys in groups.items():
            name, sizes = keys[0], [params[key].numel() for key in keys]
            held = {part: [buffer_key(part, key) for key in keys] for part in self.optimizer.buffers}
            moved, kept = self.optimizer.step(
                {name: torch.cat([self._row(params[key]) for key in keys])},
                {name: torch.cat([self._row(grads[key]) for key in keys])},
                {names[0]: torch.cat([self._row(buffers[key]) for key in names]) for names in held.values()},
                numbers,
                {} if factor is None else {name: factor},
                frozenset({name}) if bare else frozenset(),
            )
            pieces = zip(keys, moved[name].split_with_sizes(sizes), strict=True)
            new_params |= {key: self._unrow(piece, params[key]) for key, piece in pieces}
            for names in held.values():
                pieces = zip(keys, names, kept[names[0]].split_with_sizes(sizes), strict=True)
                new_buffers |= {buffer: self._unrow(piece, params[key]) for key, buffer, piece in pieces}
        return {key: new_params[key] for key in params}, new_buffers

    def _row(self, value: Tensor) -> Tensor:
        return (value.permute(0, 2, 3, 1) if self.channels_last and value.dim() == 4 else value).reshape(-1)

    def _unrow(self, part: Tensor, like: Tensor) -> Tensor:
        if not (self.channels_last and like.dim() == 4):
            return part.reshape(like.shape)
        outs, ins, height, width = like.shape
        return part.reshape(outs, height, width, ins).permute(0, 3, 1, 2)
