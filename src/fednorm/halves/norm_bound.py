"""How far clients may move the model in an exchange, measured by the others: one must not own the average.

A client is too far off where its update is longer than `factor` times that of the cohort's median client. So that an
ordinary client is not taken for an outlier among ones that hardly move, the median counts as a small share of the
model's own norm at least. What is not trained, such as variances, goes with the square of activations: there the factor
is squared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch

from fednorm.core.reductions import wide
from fednorm.core.state import Entry, Policy, Tree
from fednorm.halves.messages import Update
from fednorm.halves.schema import Schema, keys_with
from fednorm.halves.stacks import Stacks, all_norms, norms_of

NORM_FACTOR = 1000.0
"""The factor where nobody sets one: far beyond what unequal clients do, and far below what destroys a model."""
LEAST_SHARE = 1 / 250
"""Of the model's norm, which the median's update counts as at least."""
_NAMES = "its weights", "what it sends beside weights"


class Length(NamedTuple):
    """The norm of what a client sends, or of how far that is from what it was sent, in two groups of entries."""

    trained: float
    other: float


class Moved(NamedTuple):
    """How far a client moved, and in each group the entry that moved most, where that is known."""

    distance: Length
    entries: tuple[str, str] = "", ""


def groups(entries: Mapping[str, Entry]) -> tuple[list[str], list[str]]:
    """Keys of the entries that are trained, and of the others, as far as these have a length."""
    floats = {key: entry.trainable for key, entry in entries.items() if entry.dtype.is_floating_point}
    return [key for key, trained in floats.items() if trained], [key for key, trained in floats.items() if not trained]


def length_of(tree: Tree, entries: Mapping[str, Entry]) -> Length:
    """The norms of a server's tree."""
    trained, other = groups(entries)
    if not trained and not other:
        return Length(0.0, 0.0)
    squares = wide(all_norms([tree[key] for key in (*trained, *other)])).square()
    sums = [some.sum() for some in squares.split_with_sizes([len(trained), len(other)])]
    return Length(*cast(list[float], torch.stack(sums).sqrt().tolist()))  # pyright: ignore[reportUnknownMemberType]


def may_be_off(stacks: Stacks, entries: Mapping[str, Entry], model: Length, factor: float) -> bool:
    """Whether somebody may be beyond the bound, by the norms of what was sent, which are known already.

    Who moved by d from a model of norm s sends something of norm d - s at least; so small norms need no second look.
    """
    for keys, norm, bound in zip(groups(entries), model, _factors(factor), strict=True):
        margin = (bound * LEAST_SHARE - 1) * norm
        if keys and (margin <= 0 or float(stacks.lengths(keys).amax()) > margin):
            return True
    return False


def distances(stacks: Stacks, server: Tree, entries: Mapping[str, Entry]) -> list[Moved]:
    """How far each client moved from the server's tree."""
    found: list[list[tuple[float, str]]] = []
    for keys in groups(entries):
        norms = [wide(norms_of(stacks.rows(key).sub(server[key].flatten()))) for key in keys]
        if not norms:
            found.append([(0.0, "")] * len(stacks.trees))
            continue
        each = torch.stack(norms)
        most = cast(list[int], each.argmax(0).tolist())  # pyright: ignore[reportUnknownMemberType]
        lengths = cast(list[float], each.square().sum(0).sqrt().tolist())  # pyright: ignore[reportUnknownMemberType]
        found.append([(length, keys[index]) for length, index in zip(lengths, most, strict=True)])
    return [Moved(Length(trained[0], other[0]), (trained[1], other[1])) for trained, other in zip(*found, strict=True)]


def too_far(moved: Mapping[int, Moved], model: Length, factor: float | None) -> dict[int, str]:
    """Clients that moved too far, and why that is said; a client alone has nobody to be measured by.

    >>> near, far = Moved(Length(1.0, 0.0)), Moved(Length(1e6, 0.0), ("conv.weight", ""))
    >>> too_far({0: near, 1: near, 2: far}, Length(10.0, 0.0), 1000.0)
    {2: "'conv.weight' moved 1e+06 times as far as the median client; norm_factor=1000 allows less"}
    """
    refused: dict[int, str] = {}
    if not factor or len(moved) < 2:
        return refused
    for group, (norm, bound) in enumerate(zip(model, _factors(factor), strict=True)):
        usual = _usual([each.distance[group] for each in moved.values()], norm)
        for client, each in moved.items():
            # Not finite: good numbers, too large to be squared. Among zeros there is no measure.
            if usual and not each.distance[group] <= bound * usual:
                what = f"'{each.entries[group]}'" if each.entries[group] else _NAMES[group]
                times = f"{each.distance[group] / usual:.3g} times as far as the median client"
                refused.setdefault(client, f"{what} moved {times}; norm_factor={factor:g} allows less")
    return refused


def are_near(lengths: Sequence[Sequence[float]], model: Length, factor: float | None) -> bool:
    """Whether surely none of some clients moved too far, by their distances in each group: soon said, unlike who did.

    >>> are_near([[1.0, 2.0], [0.0, 0.0]], Length(10.0, 1.0), 1000.0)
    True
    >>> are_near([[1.0, float("nan")], [0.0, 0.0]], Length(10.0, 1.0), 1000.0)
    False
    """
    if not factor or len(lengths[0]) < 2:
        return True
    for each, norm, bound in zip(lengths, model, _factors(factor), strict=True):
        limit = bound * _usual(each, norm)
        if not all(length <= limit for length in each):
            return False
    return True


def _usual(lengths: Sequence[float], norm: float) -> float:
    """How far the median client moved, or the share of the model's norm that it counts as at least."""
    return max(sorted(lengths)[(len(lengths) - 1) // 2], LEAST_SHARE * norm)


T = TypeVar("T")


def _here(work: Callable[[], T]) -> list[T]:
    return [work()]


def refused_by_distance(
    updates: Sequence[Update],
    stacks: Stacks,
    server: Tree,
    schema: Schema,
    factor: float | None,
    tell_all: Callable[[Callable[[], Any]], list[Any]] = _here,
) -> dict[int, str]:
    """Clients that moved too far, and why, of updates whose values are sound and whose shared trees are `stacks`.

    Where a cohort is spread over processes, `tell_all` gives what each of them has, as JSON values.
    """
    if not factor:
        return {}
    entries = {key: schema[key][0] for key in keys_with(schema, Policy.SHARED)}
    model = length_of(server, entries)
    if not any(tell_all(lambda: bool(updates) and may_be_off(stacks, entries, model, factor))):
        return {}

    def told() -> list[Any]:
        moved = distances(stacks, server, entries) if updates else []
        return [[update.client, *each] for update, each in zip(updates, moved, strict=True)]

    each = (one for some in tell_all(told) for one in some)
    return too_far({client: Moved(Length(*moved), (a, b)) for client, moved, (a, b) in each}, model, factor)


def _factors(factor: float) -> tuple[float, float]:
    return factor, factor * factor
