"""Many tensors as one matrix: a row for each client (or run), so that one kernel copies, updates or merges them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from fednorm.core.state import Entry, Tree

ALIGNMENT = 16
"""Numbers from the begin of one row to the begin of the next are a multiple of this."""
Flats = dict[str, Tensor]
"""One matrix for each type of number, by its name; of an optimizer's buffers, one for each kind of them as well."""


class RowMatrix:
    """Where each entry lies; with `channels_last`, filters as (out, height, width, in), as the kernels read them.

    With `by_part`, entries of one part (all velocities, all first moments) have a matrix of their own.
    """

    def __init__(self, entries: Mapping[str, Entry], channels_last: bool, by_part: bool = False) -> None:
        self.channels_last = channels_last
        self.keys: dict[str, list[str]] = {}
        self.shapes = {key: entry.shape for key, entry in entries.items()}
        for key, entry in entries.items():
            name = f"{entry.part}.{entry.dtype}" if by_part else str(entry.dtype)
            self.keys.setdefault(name, []).append(key)

    def pack(self, tree: Tree) -> Flats:
        """The matrices of a tree whose tensors have a leading axis."""
        return {name: torch.cat([self._row(tree[key]) for key in keys], 1) for name, keys in self.keys.items()}

    def unpack(self, flats: Flats) -> Tree:
        """The tree as views of the matrices."""
        return {key: self._as_known(key, row) for key, row in self.rows(flats).items()}

    def rows(self, flats: Flats) -> Tree:
        """The entries as they lie, a row of numbers each, which is all the same to work by element."""
        tree: Tree = {}
        for name, keys in self.keys.items():
            parts = flats[name].split([prod(self.shapes[key]) for key in keys], 1)
            tree |= dict(zip(keys, parts, strict=True))
        return tree

    def join_rows(self, tree: Tree) -> Flats:
        """The matrices of entries as `rows` gives them, in any shape."""
        rows = {key: value if value.dim() == 2 else value.reshape(len(value), -1) for key, value in tree.items()}
        return {name: torch.cat([rows[key] for key in keys], 1) for name, keys in self.keys.items()}

    def _turned(self, shape: Sequence[int]) -> bool:
        return self.channels_last and len(shape) == 4

    def _as_known(self, key: str, row: Tensor) -> Tensor:
        shape = self.shapes[key]
        if self._turned(shape):
            return row.view(len(row), shape[0], *shape[2:], shape[1]).permute(0, 1, 4, 2, 3)
        return row if len(shape) == 1 else row.view(len(row), *shape)

    def _row(self, value: Tensor) -> Tensor:
        turned = value.permute(0, 1, 3, 4, 2) if self._turned(value.shape[1:]) else value
        return turned.reshape(len(value), -1)


def aligned_like(flat: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty matrix of this shape, in this type or another, whose rows begin at aligned addresses."""
    rows, columns = flat.shape
    return flat.new_empty(rows, columns + -columns % ALIGNMENT, dtype=dtype or flat.dtype)[:, :columns]


def aligned(flat: Tensor) -> Tensor:
    """A copy of a matrix whose rows begin at aligned addresses."""
    return aligned_like(flat).copy_(flat)


def aligned_rows(flat: Tensor, rows: Tensor) -> Tensor:
    """Copies of some rows of a matrix whose rows begin at aligned addresses; so do theirs."""
    whole = flat.as_strided((len(flat), flat.stride(0)), flat.stride())
    return whole.index_select(0, rows)[:, : flat.shape[1]]
