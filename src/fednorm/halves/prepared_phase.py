"""A phase meets a model: which entries there are, who has them, and how a client's state falls into parts."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum, auto
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fednorm.core.method import Pass, Phase, Rule, Work
from fednorm.core.optim import Optimizer
from fednorm.core.phases import PhaseId
from fednorm.core.state import Entry, Kind, Policy, Tree
from fednorm.core.step import Carry, StepMaker
from fednorm.halves.cost import Cost, exchange_cost
from fednorm.halves.messages import LocalWork
from fednorm.halves.prepared import Prepared, lr_factors
from fednorm.halves.schema import DOWN, OWN, Schema, keys_with


class Source(IntEnum):
    """Where an entry comes from when a client starts a phase."""

    SERVER = auto()
    OWN = auto()
    INITIAL = auto()
    ZEROS = auto()
    """as optimizer buffers and extras do, which have no initial value but zero"""


def source_of(key: str, policy: Policy, initial: Container[str]) -> Source:
    """Where an entry with this policy comes from, `initial` being the keys that have an initial value."""
    if policy in DOWN:
        return Source.SERVER
    if policy in OWN:
        return Source.OWN
    return Source.INITIAL if key in initial else Source.ZEROS


class Parts(NamedTuple):
    """A client's state at the end of a phase, by where it goes."""

    shared: Tree
    reported: Tree
    kept: Tree
    """what the client keeps: its local entries, and those it reported"""


_FIXED = {"epoch": ("epochs", 1), "batch": ("steps", 1)}


@dataclass(frozen=True)
class PreparedPass:
    """One pass of a client's work."""

    step: StepMaker
    rule: Rule
    work: Work
    parts: Mapping[str, str]
    """which part of a `Carry` each entry belongs to"""
    factors: Mapping[str, float]
    """on the learning rate, for the keys that have one"""

    def steps(self, work: LocalWork, per_epoch: int) -> int:
        """Steps of a client whose epoch has this many batches."""
        unit, amount = _FIXED.get(self.work, (work.unit, work.amount))
        return amount if unit == "steps" else amount * per_epoch

    @property
    def is_fixed(self) -> bool:
        """Whether it is one pass over all data or a look at one batch: a part of a measurement would be another one."""
        return self.work in _FIXED

    def carry(self, tree: Tree, anchor: Tree | None = None) -> Carry:
        """A client's state as a step takes it; without an anchor the client stands at its start.

        Trees must be copies made for the training: layers move their running statistics in place.
        """
        found: dict[str, Tree] = {part: {} for part in CARRIED}
        for key, part in self.parts.items():
            found[part][key] = tree[key]
        return Carry(**found, anchor=dict(found["params"]) if anchor is None else anchor)


CARRIED = ("params", "state", "optimizer", "extras")
"""The parts of a `Carry` that hold entries, each entry in one."""


@dataclass(frozen=True)
class PreparedPhase:
    """All that follows from a phase and a model together; made once and asked by everybody."""

    id: PhaseId
    phase: Phase
    schema: Schema
    passes: tuple[PreparedPass, ...]
    initial: Tree
    cost: Cost
    """of one client's part in the exchange"""

    @cached_property
    def shared(self) -> tuple[str, ...]:
        return tuple(keys_with(self.schema, Policy.SHARED))

    @cached_property
    def reported(self) -> tuple[str, ...]:
        return tuple(keys_with(self.schema, Policy.REPORTED))

    @cached_property
    def kept(self) -> tuple[str, ...]:
        """Entries of the client's own, which outlive the exchange."""
        return tuple(keys_with(self.schema, *OWN))

    @cached_property
    def sent(self) -> tuple[str, ...]:
        """Entries that come down from the server."""
        return tuple(keys_with(self.schema, *DOWN))

    def split(self, end: Tree) -> Parts:
        """A state at the end of a client's work, by policy."""
        return Parts(*({key: end[key] for key in keys} for keys in (self.shared, self.reported, self.kept)))

    def start(self, server: Tree, mine: Tree, device: torch.device) -> Tree:
        """What a client starts with, as the policies say: the server's entries, its own, or fresh ones; no copies."""
        initial = self.initial
        trees = {Source.SERVER: server, Source.OWN: {**initial, **mine}, Source.INITIAL: initial, Source.ZEROS: {}}
        state: Tree = {}
        for key, (entry, policy) in self.schema.items():
            value = trees[source_of(key, policy, initial)].get(key)
            state[key] = self._zeros(entry, device) if value is None else value.to(device)
        return state

    def _zeros(self, entry: Entry, device: torch.device) -> Tensor:
        """What a fresh entry begins with; the same tensor for all, as the server's are."""
        if (entry.key, device) not in self._fresh:
            self._fresh[entry.key, device] = torch.zeros(entry.shape, dtype=entry.dtype, device=device)
        return self._fresh[entry.key, device]

    @cached_property
    def _fresh(self) -> dict[tuple[str, torch.device], Tensor]:
        return {}

    def starts(self, server: Tree, each: Iterable[Tree], device: torch.device) -> list[Tree]:
        """`start` of many clients with these own states; what is not their own is the same tensors for all."""
        common = self.start(server, {}, device)
        return [{**common, **{key: mine[key].to(device) for key in self.kept if key in mine}} for mine in each]


def prepare_phase(prepared: Prepared, id: PhaseId, optimizer: Optimizer | None) -> PreparedPhase:
    """A phase of the method, with the model and the optimizer it meets."""
    phase = prepared.method.phase_at(id)
    schema = prepared.schema(phase, optimizer)
    passes = tuple(_prepare_pass(prepared, each, schema) for each in phase.passes)
    cost = exchange_cost(prepared.method, phase, schema)
    return PreparedPhase(id, phase, schema, passes, prepared.initial, cost)


def _prepare_pass(prepared: Prepared, each: Pass, schema: Schema) -> PreparedPass:
    parts, factors = _parts(prepared, each.rule, schema), lr_factors(prepared, each.rule)
    return PreparedPass(each.step, each.rule, each.work, parts, factors)


def _parts(prepared: Prepared, rule: Rule, schema: Schema) -> dict[str, str]:
    trained = {entry.key for entry in prepared.trained(rule)}

    def part(entry: Entry) -> str:
        if entry.key in trained:
            return "params"
        return "extras" if entry.extra else "optimizer" if entry.kind is Kind.OPTIMIZER else "state"

    return {key: part(entry) for key, (entry, _) in schema.items()}
