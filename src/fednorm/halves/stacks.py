"""Trees of several clients, entry by entry as stacks: who checks them and who merges them asks for the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from fednorm.core.reductions import wide
from fednorm.core.state import Tree

KEPT_SIZE = 1 << 20
"""Numbers of a stack that is kept."""
JOINED_SIZE = 1 << 14
"""Numbers of a stack that are sooner copied behind others than asked for by themselves."""


class Stacks:
    """Entries of some clients' trees, each with a leading axis over them, ascending by id; small ones are kept.

    `whole` has those that the trees were parts of from the beginning.
    """

    def __init__(self, trees: Sequence[Tree], whole: Tree | None = None) -> None:
        self.trees = trees
        self._kept: Tree = dict(whole or {})
        self._lengths: dict[tuple[str, ...], Tensor] = {}

    def __getitem__(self, key: str) -> Tensor:
        if key in self._kept:
            return self._kept[key]
        stack = torch.stack([tree[key] for tree in self.trees])
        if stack.numel() <= KEPT_SIZE:
            self._kept[key] = stack
        return stack

    def rows(self, key: str) -> Tensor:
        """An entry with one row of numbers for each client."""
        stack = self[key]
        return stack.flatten(1) if stack.dim() > 1 else stack.unsqueeze(-1)

    def lengths(self, keys: Sequence[str]) -> Tensor:
        """The Euclidean norm of some entries of each client together, in float64.

        It is not finite where a number of them is not, or is far too large.
        """
        name = tuple(keys)
        if name not in self._lengths:
            rows = [self.rows(key) for key in keys]
            small = [each for each in rows if each.numel() <= JOINED_SIZE]
            some = [each for each in rows if each.numel() > JOINED_SIZE]
            if small:
                some.append(torch.cat(small, 1) if len(small) > 1 else small[0])
            norms = torch.stack([wide(norms_of(each)) for each in some])
            self._lengths[name] = norms.square().sum(0).sqrt()
        return self._lengths[name]


def norms_of(rows: Tensor) -> Tensor:
    """The Euclidean norm of each row, in a type that is no narrower than float32."""
    norm = cast(Callable[..., Tensor], torch.linalg.vector_norm)  # pyright: ignore[reportUnknownMemberType]
    return norm(rows, dim=1, dtype=torch.float32 if rows.dtype.itemsize < 4 else None)


def all_norms(tensors: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of each tensor."""
    # One call for all, which torch names as if it were private.
    norm = cast(Callable[..., list[Tensor]], torch._foreach_norm)  # pyright: ignore
    return torch.stack(norm(list(tensors)))


def blend(old: Sequence[Tensor], new: Sequence[Tensor], rate: float) -> list[Tensor]:
    """(1 - rate) * old + rate * new of each pair."""
    # Products, then sums, as in `core.reductions.fold`; a few calls for all, which torch names as if they were private.
    times = cast(Callable[..., list[Tensor]], torch._foreach_mul)  # pyright: ignore
    plus = cast(Callable[..., list[Tensor]], torch._foreach_add)  # pyright: ignore
    return plus(times(list(old), 1 - rate), times(list(new), rate))
