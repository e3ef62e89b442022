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
from fednorm.halves.merging import merge_updates
from fednorm.halves.messages import Update
from fednorm.halves.prepared_phase import PreparedPhase
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
    layouts: dict[tuple[str, ...], _Laid] = {}
    moved: list[tuple[_Laid, Tensor]] = []
    for each, age in zip(landed, stale, strict=True):
        keys = tuple(key for key in phase.shared if key in each.update.shared and moves(phase.schema[key][0]))
        layout = layouts[keys] if keys in layouts else layouts.setdefault(keys, _Laid(keys, server))
        moved.append((layout, layout.moved(each.update.shared, bases[each.version] if age else None, strategy.form)))
    counts = [strategy.counts(age) for age in stale]
    if revise is None:
        values = [
            layout.apart(flat if count == 1 else flat.sub_(layout.server).mul_(count).add_(layout.server))
            for (layout, flat), count in zip(moved, counts, strict=True)
        ]
    else:
        plain = [layout.apart(flat) for layout, flat in moved]
        arrived = [
            _arrived(phase, version, each, bases[each.version], own) for each, own in zip(landed, plain, strict=True)
        ]
        values = [{**old, **(new or {})} for old, new in zip(plain, revise(arrived, server), strict=True)]
        values = [_discounted(each, server, count) for each, count in zip(values, counts, strict=True)]
    updates = [
        replace(each.update, shared={**_others(phase, each.update.shared, own), **own})
        for each, own in zip(landed, values, strict=True)
    ]
    return _blended(strategy, rules, phase, server, memory, updates, stale)


class _Laid:
    """The trained entries of trees, laid end to end in float64: a few operations do for all of them."""

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

    def moved(self, sent: Tree, base: Tree | None, form: str) -> Tensor:
        """What came, as if its client had begun at the server's tree of now, unless it is taken as the model it is."""
        flat = self.laid(sent)
        return flat if base is None or form == "models" else flat.add_(self.server - self.laid(base))

    def apart(self, flat: Tensor) -> Tree:
        pieces = flat.split_with_sizes(self.sizes) if self.keys else ()
        return {key: piece.reshape(shape) for key, piece, shape in zip(self.keys, pieces, self.shapes, strict=True)}


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


def _discounted(values: Tree, server: Tree, count: float) -> Tree:
    if count == 1:
        return values
    return {key: (value - server[key]).mul_(count).add_(server[key]) for key, value in values.items()}


def _others(phase: PreparedPhase, sent: Tree, values: Tree) -> Tree:
    """What an update has beside what is trained."""
    return {key: _wide(sent[key]) for key in phase.shared if key in sent and key not in values}


def _blended(
    strategy: Strategy,
    rules: Phase,
    phase: PreparedPhase,
    server: Tree,
    memory: Tree,
    updates: Sequence[Update],
    stale: Sequence[int],
) -> tuple[Tree, Tree]:
    """Merge what is wide, and let the server keep the share of its own that the strategy leaves it."""
    schema, wide_server = phase.schema, {key: _wide(server[key]) for key in phase.shared}
    order = sorted(range(len(updates)), key=lambda index: updates[index].client)
    new, remembered = dict(server), memory
    for keys, having in _by_havers(updates, order, wide_server).items():
        counts = tuple(strategy.value_counts(stale[index]) for index in having)
        share = fmean(counts)
        merging = rules
        if share and min(counts) < 1:
            weigh = {kind: Counting(rules.weigh[kind], counts) for kind in _VALUES}
            merging = replace(rules, weigh={**rules.weigh, **weigh})
        own = {key: _wide_entry(schema[key]) for key in keys if share or not _is_value(schema[key][0])}
        if not own:
            continue
        merged, remembered = merge_updates(merging, wide_server, [updates[i] for i in having], own, remembered)
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
        new |= {key: merged[key].to(server[key]) for key in own}
    return new, remembered


def _by_havers(updates: Sequence[Update], order: Sequence[int], server: Tree) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Keys that the same updates have, and these, ascending by client: all keys and all updates, but for a switch."""
    common = updates[0].shared.keys()
    if all(update.shared.keys() == common for update in updates):
        return {tuple(key for key in server if key in common): tuple(order)}
    found: dict[tuple[int, ...], list[str]] = {}
    for key in server:
        having = tuple(index for index in order if key in updates[index].shared)
        if having:
            found.setdefault(having, []).append(key)
    return {tuple(keys): having for having, keys in found.items()}


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
