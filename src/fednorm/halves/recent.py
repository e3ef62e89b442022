"""How far updates may go that arrive one by one: they are measured by those that came before (`norm_bound`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence, Set
from typing import Any, cast

import torch
from torch import Tensor

from fednorm.core.reductions import wide
from fednorm.core.state import Entry, Tree
from fednorm.halves.norm_bound import Length, Moved, groups, length_of, too_far
from fednorm.halves.stacks import all_norms, norms_of

REMEMBERED = 64
"""Updates by which the next are measured."""


class Recent:
    """The lengths of the last updates that were taken."""

    def __init__(self) -> None:
        self._lengths: deque[Length] = deque(maxlen=REMEMBERED)
        self._measured: tuple[Tree, Set[str], Length] | None = None
        """the last tree of the server that was measured, by which keys, and its length"""

    def refused(
        self, moved: Mapping[int, Moved], server: Tree, entries: Mapping[str, Entry], factor: float | None
    ) -> dict[int, str]:
        """Which of some updates went too far, and why; the others are remembered."""
        if not factor:
            return {}
        before = {-1 - index: Moved(length) for index, length in enumerate(self._lengths)}
        found = too_far({**before, **moved}, self._length(server, entries), factor)
        self._lengths.extend(each.distance for number, each in moved.items() if number not in found)
        return {number: why for number, why in found.items() if number in moved}

    def _length(self, server: Tree, entries: Mapping[str, Entry]) -> Length:
        """The length of the server's tree, which stays while updates are buffered."""
        known = self._measured
        if known is None or known[0] is not server or known[1] != entries.keys():
            known = self._measured = server, entries.keys(), length_of(server, entries)
        return known[2]

    def facts(self) -> list[list[float]]:
        """What is remembered, as JSON values."""
        return [list(each) for each in self._lengths]

    def load(self, facts: Sequence[Sequence[float]]) -> None:
        """Remember what `facts` gave."""
        self._lengths = deque((Length(*each) for each in facts), maxlen=REMEMBERED)


def moved_by(trees: Sequence[Tree], bases: Sequence[Tree], entries: Mapping[str, Entry]) -> list[Moved]:
    """How far each tree is from the one its client was sent; one question to the device for all."""
    keys = [key for group in groups(entries) for key in group]
    if not keys or not trees:
        return [Moved(Length(0.0, 0.0)) for _ in trees]
    norms = [
        wide(all_norms(torch._foreach_sub([tree[key] for key in keys], [base[key] for key in keys])))  # pyright: ignore
        for tree, base in zip(trees, bases, strict=True)
    ]
    return _all_moved(torch.stack(norms), keys, entries)


def moved_in_stack(ended: Tree, begun: Tree, entries: Mapping[str, Entry]) -> list[Moved]:
    """The same of clients whose trees are stacks, and so are those that they began with."""
    keys = [key for group in groups(entries) for key in group]
    if not keys:
        return [Moved(Length(0.0, 0.0)) for _ in next(iter(ended.values()))]
    moves = torch._foreach_sub([ended[key] for key in keys], [begun[key] for key in keys])  # pyright: ignore
    norms = [wide(norms_of(each.reshape(len(each), -1))) for each in moves]
    return _all_moved(torch.stack(norms, 1), keys, entries)


def _all_moved(norms: Tensor, keys: Sequence[str], entries: Mapping[str, Entry]) -> list[Moved]:
    """By the norms of how far each client (row) moved each entry (column)."""
    told = cast(list[list[float]], norms.tolist())  # pyright: ignore[reportUnknownMemberType]
    by_group = groups(entries)
    return [_moved(dict(zip(keys, each, strict=True)), by_group) for each in told]


def _moved(norms: Mapping[str, float], by_group: tuple[list[str], list[str]]) -> Moved:
    lengths = [sum(norms[key] ** 2 for key in group) ** 0.5 for group in by_group]
    most = [max(group, key=lambda key: norms[key], default="") for group in by_group]
    return Moved(Length(*lengths), cast(Any, tuple(most)))
