"""Counter-based randomness: every draw is a pure function of its key.

There is no generator state to save, to share or to get out of step: the same key gives the same numbers on CPU, on
CUDA, inside `torch.vmap`, after a restart, and whatever was drawn before. The hash is SplitMix64's finaliser on int64
tensors, whose wrap-around arithmetic is the same on every device.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MUL1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MUL2 = 0x94D049BB133111EB - (1 << 64)


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # torch shifts int64 arithmetically; the hash needs a logical shift


def _scramble(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MUL1
    x = (x ^ _shift(x, 27)) * _MUL2
    return x ^ _shift(x, 31)


_MASK = (1 << 64) - 1


def _scramble_int(x: int) -> int:
    x = (x ^ (x >> 30)) * _MUL1 & _MASK
    x = (x ^ (x >> 27)) * _MUL2 & _MASK
    return x ^ (x >> 31)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


@lru_cache(maxsize=256)
def _number_of_name(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")


def _number(word: int | str) -> int:
    return _number_of_name(word) if isinstance(word, str) else word & _MASK


@lru_cache(maxsize=4096)
def _fold(state: int, word: int | str) -> int:
    """A word folded into a key; of a run's keys all begin with the same words, and cohorts come again."""
    return _scramble_int((state ^ _scramble_int(_number(word) + _GOLDEN & _MASK)) + _GOLDEN & _MASK)


def key(*words: int | str | Tensor) -> Tensor:
    """Fold words into one 64-bit key; tensors broadcast, so a whole axis of clients is keyed at once.

    >>> key(0, "batch", 3).item() == key(0, "batch", torch.tensor(3)).item() != key(0, "batch", 4).item()
    True
    """
    state: int | Tensor = 0
    for word in words:
        if isinstance(state, int) and not isinstance(word, Tensor):
            # Plain numbers stay plain: fifty small tensor operations would cost more than a small model's step.
            state = _fold(state, word)
            continue
        left = _signed(state) if isinstance(state, int) else state
        if isinstance(word, Tensor):
            right: int | Tensor = _scramble(word.to(torch.int64) + _GOLDEN)
        else:
            right = _signed(_scramble_int(_number(word) + _GOLDEN & _MASK))
        state = _scramble((left ^ right) + _GOLDEN)  # type: ignore[arg-type]
    return torch.tensor(_signed(state), dtype=torch.int64) if isinstance(state, int) else state


def bits(key: Tensor, shape: Sequence[int]) -> Tensor:
    """Independent 64-bit words, one for each position of `shape`; of several keys, each has its own such words."""
    counter = torch.arange(1, math.prod(shape) + 1, dtype=torch.int64, device=key.device) * _GOLDEN
    own = key.unsqueeze(-1)
    return _scramble(_scramble(counter + own) ^ own).reshape((*key.shape, *shape))


def uniform(key: Tensor, shape: Sequence[int]) -> Tensor:
    """Float32 numbers in [0, 1), exact multiples of 2^-24 and therefore equal on every device."""
    return _shift(bits(key, shape), 40).to(torch.float32) * 2.0**-24


def normal(key: Tensor, shape: Sequence[int]) -> Tensor:
    """Float32 numbers of a normal distribution; devices may differ in the last bit of a cosine.

    >>> normal(key(7), (2, 3)).shape
    torch.Size([2, 3])
    """
    radius, angle = uniform(key, (2, *shape)).double().unbind(-1 - len(shape))
    return (torch.sqrt(-2 * torch.log1p(-radius)) * torch.cos(2 * math.pi * angle)).float()


def integers(key: Tensor, high: int, shape: Sequence[int]) -> Tensor:
    """Integers in [0, high); the bias of the modulus is below high / 2^63."""
    return _shift(bits(key, shape), 1) % high


def permutation(key: Tensor, count: int) -> Tensor:
    """A random order of 0..count-1, for each of several keys its own.

    >>> sorted(permutation(key(7), 5).tolist())
    [0, 1, 2, 3, 4]
    >>> torch.equal(permutation(key(7, torch.arange(2)), 5)[1], permutation(key(7, 1), 5))
    True
    """
    return torch.argsort(bits(key, (count,)), dim=-1, stable=True)


def subset(key: Tensor, count: int, size: int) -> list[int]:
    """`size` different numbers of 0..count-1, ascending, every set equally likely; the work grows with `size` alone.

    Floyd's algorithm: the j-th draw is from the first count - size + j numbers; one drawn before stands for the last.

    >>> subset(key(7), 10**12, 3) == subset(key(7), 10**12, 3), subset(key(7), 4, 4)
    (True, [0, 1, 2, 3])
    """
    last = torch.arange(count - size, count, dtype=torch.int64, device=key.device)
    chosen: set[int] = set()
    draws = _shift(bits(key, (size,)), 1) % (last + 1)
    numbers = cast(list[int], draws.tolist())  # pyright: ignore[reportUnknownMemberType]
    for drawn, top in zip(numbers, range(count - size, count), strict=True):
        chosen.add(top if drawn in chosen else drawn)
    return sorted(chosen)


def seed(*words: int | str) -> int:
    """`as_seed` of a key of plain words.

    >>> seed(0, "torch", 3) == as_seed(key(0, "torch", 3))
    True
    """
    state = 0
    for word in words:
        state = _fold(state, word)
    return state & ((1 << 63) - 1)


def as_seed(key: Tensor) -> int:
    """A key as a non-negative integer, for host-side generators such as `numpy.random.default_rng`."""
    return int(key.item()) & ((1 << 63) - 1)
