"""Stand-ins for functions of torch that draw from its hidden generator, or that cannot be mapped over clients.

Layers of torch and of users call them in their forward passes: `functional.dropout`, attention with dropout, an LSTM's
dropout, `torch.rand`. A mode sees every such call and draws from the key of the step instead, so that the numbers are a
function of (seed, client, step, call): equal after a restart, in any order of clients, and in a stack of clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fednorm.core import rng
from fednorm.layers.attention import attend, multi_head
from fednorm.layers.keyed import dropped, mask_shape
from fednorm.layers.recurrent import ALONE, CELLS, PACKED, recur, step_once

_ALPHA = 1.7580993408473766  # minus the limit of SELU at minus infinity, to which alpha dropout sends what it drops


@lru_cache(maxsize=4096)
def _salt(call: int) -> int:
    # A plain integer: folding it into the key needs no copy from host to device, so CUDA graphs can capture it.
    return int(rng.key("call", call).item())


class StandIns(TorchFunctionMode):
    """A forward pass inside draws from this key; `mapped` says that it is mapped over clients, each with its own."""

    def __init__(self, key: Tensor, mapped: bool = False) -> None:
        super().__init__()
        self.key, self.mapped = key, mapped
        self.drawn = 0
        """how many times it drew"""
        self.met = False
        """whether some function was called that has a stand-in"""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        other = _STAND_INS.get(func)
        if other is None or kwargs.get("generator") is not None:  # a generator of the user's own is left alone
            return func(*args, **kwargs)
        self.met = True
        return other(self, func, *args, **{name: value for name, value in kwargs.items() if name != "generator"})

    def next_key(self) -> Tensor:
        key = self.key ^ _salt(self.drawn)
        self.drawn += 1
        return key

    def uniform(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Float32 numbers in [0, 1)."""
        return rng.uniform(self.next_key(), shape).to(device)

    def drop(self, x: Tensor, p: float, shape: Sequence[int] | None = None) -> Tensor:
        """x with what the next key draws for this shape, or for its own, set to zero."""
        return dropped(x, self.next_key(), p, x.shape if shape is None else shape) if p < 1 else x * 0

    def dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return self.drop(x, p) if training and p > 0 else x

    def attention(self, *args: Any, **kwargs: Any) -> Tensor:
        return attend(*args, **kwargs, dropout=self.dropout)


_STAND_INS: dict[Any, Callable[..., Any]] = {}


def _for(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def enter(stand_in: Callable[..., Any]) -> Callable[..., Any]:
        _STAND_INS.update(dict.fromkeys(functions, stand_in))
        return stand_in

    return enter


def _put(x: Tensor, values: Tensor, inplace: bool = True) -> Tensor:
    return x.copy_(values) if inplace else values


# --- dropout ---------------------------------------------------------------------------------------------------------


def _of_kind(spatial: int) -> Callable[..., Tensor]:
    def drop(mode: StandIns, func: Any, /, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False):
        if not training or not 0 < p <= 1:
            return func(input, p, training, inplace)
        return _put(input, mode.drop(input, p, mask_shape(input, spatial)), inplace)

    return drop


_KINDS = (functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d)
_STAND_INS.update({func: _of_kind(spatial) for spatial, func in enumerate(_KINDS)})


@_for(torch.dropout, torch.dropout_)
def _dropout(mode: StandIns, func: Any, /, input: Tensor, p: float, train: bool) -> Tensor:
    return _put(input, mode.drop(input, p), func is torch.dropout_) if train and 0 < p <= 1 else func(input, p, train)


@_for(functional.alpha_dropout, functional.feature_alpha_dropout)
def _alpha_dropout(
    mode: StandIns, func: Any, /, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    if not training or not 0 < p <= 1:
        return func(input, p, training, inplace)
    whole = func is functional.feature_alpha_dropout
    shape = [*input.shape[:2], *[1] * (input.dim() - 2)] if whole else input.shape
    if p == 1:
        return _put(input, input * 0, inplace)
    scale = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p))
    kept = torch.where(mode.uniform(shape, input.device) >= p, input, -_ALPHA)
    return _put(input, (kept + _ALPHA * p) * scale, inplace)


@_for(functional.rrelu)
def _rrelu(
    mode: StandIns, func: Any, /, input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False,
    inplace: bool = False,
) -> Tensor:  # fmt: skip
    if not training:
        return func(input, lower, upper, training, inplace)
    slope = lower + (upper - lower) * _uniform(mode, input)
    return _put(input, torch.where(input > 0, input, input * slope), inplace)


# --- layers with dropout inside, and those without a rule for vmap ---------------------------------------------------


@_for(functional.scaled_dot_product_attention)
def _attention(mode: StandIns, func: Any, /, *args: Any, **kwargs: Any) -> Tensor:
    p = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
    # Torch's fused kernels are played one client at a time by vmap.
    return mode.attention(*args, **kwargs) if mode.mapped or p > 0 else func(*args, **kwargs)


@_for(functional.multi_head_attention_forward)
def _multi_head(mode: StandIns, func: Any, /, *args: Any, **kwargs: Any) -> Any:
    def attention(*args: Any, **kwargs: Any) -> Tensor:
        return _attention(mode, functional.scaled_dot_product_attention, *args, **kwargs)

    return multi_head(attention, mode.dropout)(*args, **kwargs)


@_for(*CELLS)
def _recurrence(mode: StandIns, func: Any, /, *args: Any) -> Any:
    layers, p, training = args[4:7] if isinstance(args[3], bool) else args[5:8]
    if not mode.mapped and not (layers > 1 and p > 0 and training):
        return func(*args)
    return recur(func, args, mode.drop, mode.mapped)


@_for(*ALONE)
def _step_once(mode: StandIns, func: Any, /, *args: Any) -> Any:
    return step_once(func, *args) if mode.mapped else func(*args)


@_for(torch._pack_padded_sequence)  # pyright: ignore[reportPrivateImportUsage]
def _pack(mode: StandIns, func: Any, /, *args: Any) -> Any:
    if mode.mapped:
        raise NotImplementedError(PACKED)
    return func(*args)


@_for(functional.embedding_bag)
def _embedding_bag(
    mode: StandIns,
    func: Any,
    /,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    if not mode.mapped:
        return func(input, weight, offsets, *args, **kwargs)
    if input.dim() != 2 or kwargs.get("scale_grad_by_freq") or args:
        raise NotImplementedError("an EmbeddingBag with offsets or with gradients scaled by frequency")
    how, padding, weights = (kwargs.get(name) for name in ("mode", "padding_idx", "per_sample_weights"))
    rows = functional.embedding(input, weight, padding)
    kept = torch.ones_like(input, dtype=torch.bool) if padding is None else input != padding
    kept = kept.unsqueeze(-1)
    if how == "max":
        best = torch.where(kept, rows, -math.inf).amax(1)
        return torch.where(kept.any(1), best, 0)
    rows = rows if weights is None else rows * weights.unsqueeze(-1)
    total = torch.where(kept, rows, 0).sum(1)
    return total if how == "sum" else total / kept.sum(1).clamp_min(1)


@_for(torch._weight_norm)  # pyright: ignore[reportPrivateImportUsage]
def _weight_norm(mode: StandIns, func: Any, /, v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    if not mode.mapped:
        return func(v, g, dim)
    axes = [axis for axis in range(v.dim()) if axis != dim]  # all of them for -1
    return v * (g / torch.linalg.vector_norm(v, dim=axes, keepdim=dim >= 0))


# --- plain random numbers --------------------------------------------------------------------------------------------


def _uniform(mode: StandIns, like: Tensor) -> Tensor:
    return mode.uniform(like.shape, like.device).to(like.dtype)


def _normal(mode: StandIns, like: Tensor) -> Tensor:
    """Two uniform numbers make a normal one (Box and Muller)."""
    radius, angle = (mode.uniform(like.shape, like.device).to(torch.float64) for _ in range(2))
    return (torch.sqrt(-2 * torch.log1p(-radius)) * torch.cos(2 * math.pi * angle)).to(like.dtype)


_MAKERS = {
    torch.rand: (torch.empty, _uniform),
    torch.randn: (torch.empty, _normal),
    torch.rand_like: (torch.empty_like, _uniform),
    torch.randn_like: (torch.empty_like, _normal),
}


@_for(*_MAKERS)
def _random(mode: StandIns, func: Any, /, *args: Any, **kwargs: Any) -> Tensor:
    blank, fill = _MAKERS[func]
    return fill(mode, blank(*args, **kwargs))


@_for(torch.bernoulli, Tensor.bernoulli)
def _bernoulli(mode: StandIns, func: Any, /, input: Tensor, p: float | None = None) -> Tensor:
    return (mode.uniform(input.shape, input.device) < (input if p is None else p)).to(input.dtype)


@_for(Tensor.bernoulli_)
def _bernoulli_(mode: StandIns, func: Any, /, x: Tensor, p: Tensor | float = 0.5) -> Tensor:
    return _put(x, (mode.uniform(x.shape, x.device) < p).to(x.dtype))


@_for(Tensor.uniform_)
def _uniform_(mode: StandIns, func: Any, /, x: Tensor, low: float = 0, high: float = 1, **named: float) -> Tensor:
    low, high = named.get("from", low), named.get("to", high)
    return _put(x, low + (high - low) * _uniform(mode, x))


@_for(Tensor.normal_)
def _normal_(mode: StandIns, func: Any, /, x: Tensor, mean: float = 0, std: float = 1) -> Tensor:
    return _put(x, mean + std * _normal(mode, x))


@_for(torch.empty)
def _empty(mode: StandIns, func: Any, /, *args: Any, **kwargs: Any) -> Tensor:
    """Room for each client's own numbers, which are often drawn in place."""
    blank = func(*args, **kwargs)
    return torch.where(mode.key == mode.key, blank, blank) if mode.mapped else blank


@_for(Tensor.data_ptr)
def _address(mode: StandIns, func: Any, /, tensor: Tensor) -> int:
    """On a GPU recurrent layers ask whether their weights lie side by side; those of a stack have no addresses."""
    return 0 if mode.mapped else func(tensor)
