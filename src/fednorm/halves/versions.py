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
    layouts = _Layouts(phase, server)
    laid = [
        layouts.laid(each.update.shared, bases[each.version] if age and strategy.form != "models" else None)
        for each, age in zip(landed, stale, strict=True)
    ]
    if revise is not None:
        arrived = [
            _arrived(phase, version, each, bases[each.version], own.trained.apart(own.moved))
            for each, own in zip(landed, laid, strict=True)
        ]
        laid = [own.revised(new or {}) for own, new in zip(laid, revise(arrived, server), strict=True)]
    laid = [own.discounted(strategy.counts(age)) for own, age in zip(laid, stale, strict=True)]
    return _blended(strategy, rules, phase, server, layouts.wide_server(), memory, landed, laid, stale)


class _Layout:
    """Entries of trees laid end to end in float64: a few operations do for all of them."""

    def __init__(self, keys: Sequence[str], server: Tree) -> None:
        self.keys = keys
        self.shapes = [server[key].shape for key in keys]
        self.sizes = [server[key].numel() for key in keys]
        self.server = self.laid(server)

    def laid(self, tree: Tree) -> Tensor:
        """A tensor of its own, whatever the tree's are."""
        if not self.keys:
            return torch.zeros(0, dtype=torch.float64)
        return wide(torch.cat([tree[key].flatten() for key in self.keys]))

    def apart(self, flat: Tensor) -> Tree:
        """The entries of what is laid so; of a stack, each with its leading axis."""
        pieces = flat.split_with_sizes(self.sizes, -1) if self.keys else ()
        stack = flat.shape[:-1]
        return {
            key: piece.view(*stack, *shape) for key, piece, shape in zip(self.keys, pieces, self.shapes, strict=True)
        }


@dataclass(frozen=True)
class _Laid:
    """What an update shares: what is trained, other numbers of any size, and the rest as it was sent."""

    trained: _Layout
    moved: Tensor
    """as if its client had begun at the server's tree of now, unless it is taken as the model it is"""
    others: _Layout
    values: Tensor
    rest: Tree

    @property
    def keys(self) -> set[str]:
        return {*self.trained.keys, *self.others.keys, *self.rest}

    def tree(self) -> Tree:
        return {**self.rest, **self.others.apart(self.values), **self.trained.apart(self.moved)}

    def revised(self, new: Tree) -> _Laid:
        """With something in the place of what is trained."""
        if not new:
            return self
        return replace(self, moved=self.trained.laid({**self.trained.apart(self.moved), **new}))

    def discounted(self, count: float) -> _Laid:
        """With changes that count for less."""
        if count == 1:
            return self
        server = self.trained.server
        return replace(self, moved=(self.moved - server).mul_(count).add_(server))


class _Layouts:
    """How the updates of a version are laid out; those with the same entries alike."""

    def __init__(self, phase: PreparedPhase, server: Tree) -> None:
        self._phase, self._server = phase, server
        self._of: dict[tuple[str, ...], tuple[_Layout, _Layout]] = {}

    def laid(self, sent: Tree, base: Tree | None) -> _Laid:
        """What a client sent; with a base, from which it went, where that is not the server's tree of now."""
        keys = tuple(key for key in self._phase.shared if key in sent)
        if keys not in self._of:
            trained = [key for key in keys if moves(self._phase.schema[key][0])]
            others = [key for key in keys if key not in trained and self._server[key].is_floating_point()]
            self._of[keys] = _Layout(trained, self._server), _Layout(others, self._server)
        trained, others = self._of[keys]
        moved = trained.laid(sent)
        if base is not None:
            moved.add_(trained.server - trained.laid(base))
        rest = {key: sent[key] for key in keys if not sent[key].is_floating_point()}
        return _Laid(trained, moved, others, others.laid(sent), rest)

    def wide_server(self) -> Tree:
        """What is shared of the server's tree, in float64."""
        laid: Tree = {}
        for trained, others in self._of.values():
            laid |= trained.apart(trained.server) | others.apart(others.server)
        return {key: laid[key] if key in laid else _wide(self._server[key]) for key in self._phase.shared}


def _stacked(laid: Sequence[_Laid]) -> Tree | None:
    """The entries of updates, each with a leading axis over them; None where not all are laid out alike."""
    first = laid[0]
    if any(each.trained is not first.trained or each.others is not first.others for each in laid):
        return None
    stacks = first.trained.apart(torch.stack([each.moved for each in laid]))
    stacks |= first.others.apart(torch.stack([each.values for each in laid]))
    return stacks | {key: torch.stack([each.rest[key] for each in laid]) for key in first.rest}


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
    wide_server: Tree,
    memory: Tree,
    landed: Sequence[Landed],
    laid: Sequence[_Laid],
    stale: Sequence[int],
) -> tuple[Tree, Tree]:
    """Merge what is wide, and let the server keep the share of its own that the strategy leaves it."""
    schema, new, remembered = phase.schema, dict(server), memory
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
    stacks = _stacked(laid)
    if stacks is None:
        wide_ones = [replace(update, shared=own.tree()) for update, own in zip(updates, laid, strict=True)]
        return merge_updates(rules, server, wide_ones, schema, memory)
    shared = {key: stacks[key] for key in keys_with(schema, Policy.SHARED)}
    reports = Reports.of([update.report for update in updates], laid[0].moved.device)
    merged, remembered = merge_stack(rules, server, shared, reports, schema, memory)
    return merged, apart(remembered, memory)


def _by_havers(laid: Sequence[_Laid], order: Sequence[int], server: Tree) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Keys that the same updates have, and these, ascending by client: all keys and all updates, but for a switch."""
    having: dict[tuple[int, ...], list[str]] = {}
    keys = [each.keys for each in laid]
    for key in server:
        some = tuple(index for index in order if key in keys[index])
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
