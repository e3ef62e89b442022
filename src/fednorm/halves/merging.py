"""The server's part of an exchange: what clients sent is merged in client-id order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeGuard, TypeVar

import torch
from torch import Tensor

from fednorm.core.merge import Fusable, Merge
from fednorm.core.method import Phase
from fednorm.core.reductions import cohort
from fednorm.core.report import Report, Reports, Weigh
from fednorm.core.state import Entry, Kind, Policy, Tree
from fednorm.errors import ConfigError
from fednorm.halves.messages import Update
from fednorm.halves.schema import Schema, keys_with
from fednorm.halves.stacks import Stacks


def merge_updates(
    phase: Phase,
    server: Tree,
    updates: Sequence[Update],
    schema: Schema,
    memory: Tree,
    reports: Sequence[Report] | None = None,
    stacks: Stacks | None = None,
) -> tuple[Tree, Tree]:
    """The server's next state and memory: shared entries merged by their kinds' rules, all others kept.

    Updates are sorted by client id first, so their order of arrival cannot change a bit. `reports` are those of the
    whole cohort, where the updates are only a part of its (`reductions.Cohort`). `stacks` are those of the updates'
    shared trees, where somebody made them before.
    """
    reports = [update.report for update in updates] if reports is None else reports
    if not reports:
        raise ConfigError("there are no updates to merge; at least one client must take part")
    keys = keys_with(schema, Policy.SHARED)
    device = (updates[0].shared if updates else server)[keys[0]].device if keys else torch.device("cpu")
    stacks = stacks or Stacks([each.shared for each in sorted(updates, key=lambda each: each.client)])

    def stacked(key: str) -> Tensor:
        return stacks[key] if updates else server[key].new_empty(0, *server[key].shape)

    vectors = Reports.of(sorted(reports, key=lambda report: report.client), device)
    merged, remembered = merge_stack(phase, server, _Lazy(keys, stacked), vectors, schema, memory)
    return apart(merged, server), apart(remembered, memory)


def merge_stack(
    phase: Phase, server: Tree, shared: Mapping[str, Tensor], reports: Reports, schema: Schema, memory: Tree
) -> tuple[Tree, Tree]:
    """`merge_updates` of a stack: `shared` has a leading client axis, ascending by client id, and so have the reports.

    No value is asked from the device, and all of it maps over runs (`torch.vmap`). New tensors are views into longer
    ones: what one rule merges together lies together.
    """
    merged, remembered = dict(server), dict(memory)
    kinds: dict[Kind | str, dict[str, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for key in shared:
        entry = schema[key][0]
        kinds[entry.extra or entry.kind][entry.layer].append(entry)
    held, whole = _by_rule(memory), cohort()
    common: dict[Weigh, Tensor] = {}  # weights that do not look at what was sent are the same for all kinds
    fused: dict[tuple[Fusable, Weigh, torch.dtype], list[Entry]] = defaultdict(list)
    for kind, layers in kinds.items():
        rule, weigh = phase.rules_of(next(iter(layers.values()))[0])
        sent = _Lazy(layers, lambda layer, of=layers: {e.part: whole.gathered(shared[e.key]) for e in of[layer]})
        weights = common[weigh] if weigh in common else whole.own(weigh(reports, sent))
        if not sent.asked:
            common[weigh] = weights
            if _is_fusable(rule):
                for entry in (entry for entries in layers.values() for entry in entries):
                    fused[rule, weigh, entry.dtype].append(entry)
                continue
        prefixes = {layer: f"{phase.name}|{layer}|{kind}" for layer in layers}
        for group in _groups(layers, {layer: held[prefix] for layer, prefix in prefixes.items()}):
            parts = _parts([layers[layer] for layer in group])
            mine = [held[prefixes[layer]] for layer in group]
            old = {part: _joined([server[entry.key] for entry in entries], 0) for part, entries in parts.items()}
            stack = {part: _joined([shared[entry.key] for entry in entries], 1) for part, entries in parts.items()}
            known = {
                name: _joined([each[name] for each in mine], 0) if _part_of(name) in parts else value
                for name, value in mine[0].items()
            }
            new, left = rule(old, stack, weights, known)
            for part, entries in parts.items():
                pieces = new[part].split_with_sizes([entry.size for entry in entries])
                merged |= {e.key: piece.reshape(e.shape) for e, piece in zip(entries, pieces, strict=True)}
            for name, value in left.items():
                entries = parts.get(_part_of(name))
                pieces = value.split_with_sizes([entry.size for entry in entries]) if entries else [value] * len(group)
                for layer, piece in zip(group, pieces, strict=True):
                    remembered[f"{prefixes[layer]}|{name}"] = piece
    order = {key: index for index, key in enumerate(shared)}
    for (rule, weigh, dtype), entries in fused.items():
        for some in _no_more_than_fit(sorted(entries, key=lambda entry: order[entry.key])):
            new = rule.joined(_joined([shared[entry.key] for entry in some], 1), common[weigh]).to(dtype)
            pieces = new.split_with_sizes([entry.size for entry in some])
            merged |= {e.key: piece.reshape(e.shape) for e, piece in zip(some, pieces, strict=True)}
    return merged, remembered


def _is_fusable(rule: Merge) -> TypeGuard[Fusable]:
    """Whether a rule is a `Fusable`; asking a protocol itself takes as long as merging a small layer."""
    return hasattr(rule, "joined")


GROUP_SIZE = 1 << 20
"""Elements of one client that are stacked at a time, unless one layer alone has more: a bound on memory."""


def _groups(layers: Mapping[str, list[Entry]], memory: Mapping[str, Tree]) -> list[list[str]]:
    """Layers that one call of a rule can merge: same parts, types and names of memory, and no more than fit."""
    groups: list[list[str]] = []
    room: dict[Hashable, tuple[list[str], int]] = {}
    for layer, entries in layers.items():
        look = (tuple((entry.part, entry.dtype) for entry in entries), tuple(sorted(memory[layer])))
        size = sum(entry.size for entry in entries)
        group, used = room.get(look, (None, 0))
        if group is None or used + size > GROUP_SIZE:
            groups.append([])
            group, used = groups[-1], 0
        group.append(layer)
        room[look] = group, used + size
    return groups


def _no_more_than_fit(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Entries in order, as many at a time as may be stacked."""
    some: list[Entry] = []
    used = 0
    for entry in entries:
        if some and used + entry.size > GROUP_SIZE:
            yield some
            some, used = [], 0
        some.append(entry)
        used += entry.size
    if some:
        yield some


def _parts(layers: Sequence[list[Entry]]) -> dict[str, list[Entry]]:
    """The entries of a group of layers by part, in the order of the layers."""
    return {entry.part: [layer[index] for layer in layers] for index, entry in enumerate(layers[0])}


def _joined(tensors: Sequence[Tensor], axis: int) -> Tensor:
    """Tensors flattened from an axis on and laid end to end along it."""
    flat = [tensor.flatten(axis) if tensor.dim() > axis else tensor.unsqueeze(-1) for tensor in tensors]
    return torch.cat(flat, axis) if len(flat) > 1 else flat[0]


def _part_of(name: str) -> str:
    """The part whose elements a piece of memory goes with, as its name tells (`Merge`)."""
    return name.partition(".")[0]


def _by_rule(memory: Tree) -> Mapping[str, Tree]:
    """What rules remember, by phase, layer and kind, then by the rule's own name for it."""
    held: dict[str, Tree] = defaultdict(dict)
    for key, value in memory.items():
        prefix, _, name = key.rpartition("|")
        held[prefix][name] = value
    return held


def apart(tree: Tree, before: Tree) -> Tree:
    """The tree with its new tensors in storage of their own: a view's odd address would change how products round."""
    return {key: value if before.get(key) is value else value.clone() for key, value in tree.items()}


T = TypeVar("T")


class _Lazy(Mapping[str, T]):
    """A mapping that makes its values when they are asked for, so that no more than those are held."""

    def __init__(self, keys: Iterable[str], make: Callable[[str], T]) -> None:
        self._keys = list(keys)
        self._make = make
        self.asked = False

    def __getitem__(self, key: str) -> T:
        self.asked = True
        return self._make(key)

    def __iter__(self) -> Iterator[str]:
        self.asked = True
        return iter(self._keys)

    def __len__(self) -> int:
        self.asked = True
        return len(self._keys)
