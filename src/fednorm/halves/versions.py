"""How updates that began at different versions of the model make the next one, as a strategy says.

Where all of them are fresh, the server's rate is 1 and nothing is revised, this is the merge of a round, to the bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from fednorm.core.method import Phase
from fednorm.core.phases import PhaseId
from fednorm.core.reductions import wide
from fednorm.core.report import Layers, Reports, Weigh, normalised
from fednorm.core.state import Entry, Kind, Policy, Tree
from fednorm.core.strategy import Arrived, Strategy
from fednorm.halves.merging import apart, merge_stack, merge_updates
from fednorm.halves.messages import Update
from fednorm.halves.prepared_phase import PreparedPhase
from fednorm.halves.schema import Schema, keys_with
from fednorm.halves.stacks import blend

_VALUES = (Kind.STATISTIC, Kind.OPTIMIZER, Kind.EXTRA)
"""Kinds that are merged as values where they are not trained."""


Revising = Callable[[Sequence[Arrived], Tree], Sequence[Tree | None]]
"""(updates that arrived, the server's tree) -> what takes the place of their trained entries; None leaves one."""


class Landed(NamedTuple):
    """An update that was taken, with the version its client began at."""

    number: int
    version: int
    phase: PhaseId
    update: Update

    @property
    def client(self) -> int:
        return self.update.client


@dataclass(frozen=True)
class Counting:
    """Weights in which each client counts by a factor of its own, ascending by client id."""

    weigh: Weigh
    counts: tuple[float, ...]

    def __call__(self, reports: Reports, layers: Layers) -> Tensor:
        weights = self.weigh(reports, layers)
        return normalised(weights * torch.tensor(self.counts, dtype=weights.dtype, device=weights.device))


def moves(entry: Entry) -> bool:
    """Whether an entry goes on from where the server is: what is trained, and what a method declares beside it."""
    trained = entry.trainable or bool(entry.extra) or entry.kind in (Kind.WEIGHT, Kind.AFFINE)
    return trained and entry.dtype.is_floating_point


def next_version(
    strategy: Strategy,
    phase: PreparedPhase,
    rules: Phase,
    server: Tree,
    memory: Tree,
    version: int,
    landed: Sequence[Landed],
    bases: Mapping[int, Tree],
    revise: Revising | None = None,
) -> tuple[Tree, Tree]:
    """The server's next tree and what merges remember, of updates in the order they arrived.

    `phase` is the one of now, with the merges and weights of `rules`. An update that began in another phase merges
    only what both share.
    """
    stale = [version - each.version for each in landed]
    if strategy.rate == 1 and not any(stale) and revise is None:
        ordered = sorted((each.update for each in landed), key=_client)
        return merge_updates(rules, server, ordered, phase.schema, memory)
    laid = _laid(phase, server, landed)
    for own, each, age in zip(laid, landed, stale, strict=True):
        if age and strategy.form != "models":
            own.move_from(bases[each.version])
    if revise is not None:
        arrived = [
            _arrived(phase, version, each, bases[each.version], own.moved)
            for each, own in zip(landed, laid, strict=True)
        ]
        for own, new in zip(laid, revise(arrived, server), strict=True):
            own.take(new or {})
    for own, age in zip(laid, stale, strict=True):
        own.discount(strategy.counts(age))
    return _blended(strategy, rules, phase, server, memory, landed, laid, stale)


class _Rows:
    """Entries of trees laid end to end in float64, a row a tree: a few operations do for all of them."""

    def __init__(self, keys: Sequence[str], server: Tree, trees: Sequence[Tree]) -> None:
        self.keys = keys
        self._shapes = [server[key].shape for key in keys]
        self._sizes = [server[key].numel() for key in keys]
        self.server = self.laid(server)
        self.rows = self.server.new_empty(len(trees), len(self.server))
        for row, tree in zip(self.rows, trees, strict=True):
            row.copy_(self._joined(tree))

    def _joined(self, tree: Tree) -> Tensor:
        return torch.cat([tree[key].flatten() for key in self.keys]) if self.keys else torch.zeros(0)

    def laid(self, tree: Tree) -> Tensor:
        """A tree's entries, in a tensor of its own."""
        return wide(self._joined(tree))

    def apart(self, flat: Tensor) -> Tree:
        """The entries of what is laid so; of several rows, each with their leading axis."""
        pieces = flat.split_with_sizes(self._sizes, -1) if self.keys else ()
        rows = flat.shape[:-1]
        return {
            key: piece.view(*rows, *shape) for key, piece, shape in zip(self.keys, pieces, self._shapes, strict=True)
        }


class _Alike:
    """Updates with the same entries, ascending by client: what is trained, other numbers, and the rest as it came."""

    def __init__(self, phase: PreparedPhase, server: Tree, keys: Sequence[str], sent: Sequence[Tree]) -> None:
        trained = [key for key in keys if moves(phase.schema[key][0])]
        others = [key for key in keys if key not in trained and server[key].is_floating_point()]
        self.keys = frozenset(keys)
        self.trained, self.others = _Rows(trained, server, sent), _Rows(others, server, sent)
        self.rest = [{key: tree[key] for key in keys if not server[key].is_floating_point()} for tree in sent]

    def stacks(self) -> Tree:
        """Each entry with a leading axis over the updates."""
        rest = {key: torch.stack([tree[key] for tree in self.rest]) for key in self.rest[0]}
        return rest | self.others.apart(self.others.rows) | self.trained.apart(self.trained.rows)

    def wide_server(self) -> Tree:
        """The server's own numbers of these entries."""
        return self.others.apart(self.others.server) | self.trained.apart(self.trained.server)


@dataclass(frozen=True)
class _Laid:
    """An update as a row among those with the same entries."""

    alike: _Alike
    row: int

    @property
    def _flat(self) -> Tensor:
        return self.alike.trained.rows[self.row]

    @property
    def moved(self) -> Tree:
        """What is trained, in tensors that stay as they are."""
        return self.alike.trained.apart(self._flat.clone())

    def tree(self) -> Tree:
        trained, others = self.alike.trained, self.alike.others
        return self.alike.rest[self.row] | others.apart(others.rows[self.row]) | trained.apart(self._flat)

    def move_from(self, base: Tree) -> None:
        """Let it be as if its client, which began at the base, had begun at the server's tree of now."""
        trained = self.alike.trained
        self._flat.add_(trained.server - trained.laid(base))

    def take(self, new: Tree) -> None:
        """Put something in the place of what is trained."""
        if new:
            trained = self.alike.trained
            self._flat.copy_(trained.laid({**trained.apart(self._flat), **new}))

    def discount(self, count: float) -> None:
        """Let its changes count for less."""
        if count != 1:
            server = self.alike.trained.server
            self._flat.sub_(server).mul_(count).add_(server)


def _laid(phase: PreparedPhase, server: Tree, landed: Sequence[Landed]) -> list[_Laid]:
    """The updates of a version as they are merged, in the order they came."""
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for index in sorted(range(len(landed)), key=lambda index: landed[index].client):
        groups[tuple(key for key in phase.shared if key in landed[index].update.shared)].append(index)
    found: dict[int, _Laid] = {}
    for keys, indices in groups.items():
        alike = _Alike(phase, server, keys, [landed[index].update.shared for index in indices])
        found |= {index: _Laid(alike, row) for row, index in enumerate(indices)}
    return [found[index] for index in range(len(landed))]


def _arrived(phase: PreparedPhase, version: int, each: Landed, base: Tree, moved: Tree) -> Arrived:
    return Arrived(
        number=each.number,
        staleness=version - each.version,
        version=version,
        report=each.update.report,
        shared=each.update.shared,
        reported=each.update.reported,
        base={key: base[key] for key in phase.sent},
        moved=moved,
        hold=phase.phase.rule.hold,
    )


def _blended(
    strategy: Strategy,
    rules: Phase,
    phase: PreparedPhase,
    server: Tree,
    memory: Tree,
    landed: Sequence[Landed],
    laid: Sequence[_Laid],
    stale: Sequence[int],
) -> tuple[Tree, Tree]:
    """Merge what is wide, and let the server keep the share of its own that the strategy leaves it."""
    schema, new, remembered = phase.schema, dict(server), memory
    kinds = dict.fromkeys(each.alike for each in laid)
    known = {key: value for alike in kinds for key, value in alike.wide_server().items()}
    wide_server = {key: known[key] if key in known else _wide(server[key]) for key in phase.shared}
    order = sorted(range(len(landed)), key=lambda index: landed[index].client)
    for keys, having in _by_havers(laid, order, wide_server).items():
        counts = tuple(strategy.value_counts(stale[index]) for index in having)
        share = fmean(counts)
        merging = rules
        if share and min(counts) < 1:
            weigh = {kind: Counting(rules.weigh[kind], counts) for kind in _VALUES}
            merging = replace(rules, weigh={**rules.weigh, **weigh})
        own = {key: _wide_entry(schema[key]) for key in keys if share or not _is_value(schema[key][0])}
        if not own:
            continue
        merged, remembered = _merged(
            merging, wide_server, [landed[i].update for i in having], [laid[i] for i in having], own, remembered
        )
        at_rate: dict[float, list[str]] = defaultdict(list)
        for key, (entry, _) in own.items():
            if entry.kind is Kind.COUNTER:
                merged[key] = torch.maximum(merged[key], wide_server[key])
            elif entry.dtype.is_floating_point:
                at_rate[strategy.rate if moves(entry) else min(strategy.rate, 1.0) * share].append(key)
        for rate, some in at_rate.items():
            if rate != 1:
                mixed = blend([wide_server[key] for key in some], [merged[key] for key in some], rate)
                merged |= zip(some, mixed, strict=True)
        new |= {key: torch.empty_like(server[key]).copy_(merged[key]) for key in own}
    return new, remembered


def _merged(
    rules: Phase, server: Tree, updates: Sequence[Update], laid: Sequence[_Laid], schema: Schema, memory: Tree
) -> tuple[Tree, Tree]:
    """`merge_updates` of updates as they are laid out, ascending by client; what is new may be a part of something."""
    alike = laid[0].alike
    if any(each.alike is not alike for each in laid):
        wide_ones = [replace(update, shared=own.tree()) for update, own in zip(updates, laid, strict=True)]
        return merge_updates(rules, server, wide_ones, schema, memory)
    stacks = alike.stacks()
    shared = {key: stacks[key] for key in keys_with(schema, Policy.SHARED)}
    reports = Reports.of([update.report for update in updates], next(iter(shared.values())).device)
    merged, remembered = merge_stack(rules, server, shared, reports, schema, memory)
    return merged, apart(remembered, memory)


def _by_havers(laid: Sequence[_Laid], order: Sequence[int], server: Tree) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Keys that the same updates have, and these, ascending by client: all keys and all updates, but for a switch."""
    having: dict[tuple[int, ...], list[str]] = {}
    for key in server:
        some = tuple(index for index in order if key in laid[index].alike.keys)
        if some:
            having.setdefault(some, []).append(key)
    return {tuple(keys): some for some, keys in having.items()}


def _client(update: Update) -> int:
    return update.client


def _is_value(entry: Entry) -> bool:
    return entry.kind in _VALUES and not moves(entry)


def _wide(tensor: Tensor) -> Tensor:
    return wide(tensor) if tensor.is_floating_point() else tensor


def _wide_entry(known: tuple[Entry, Policy]) -> tuple[Entry, Policy]:
    return _wide_of(known[0]), known[1]


@lru_cache(maxsize=4096)
def _wide_of(entry: Entry) -> Entry:
    return replace(entry, dtype=torch.float64) if entry.dtype.is_floating_point else entry
