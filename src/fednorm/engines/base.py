"""What an engine is: it trains a cohort of clients for one phase. Everything else about a round is the same for all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from fednorm.client import StepSpec
from fednorm.method import Phase
from fednorm.plan import Plan
from fednorm.prepare import lr_factors
from fednorm.server import Schema, Update
from fednorm.state import Policy, Tree


@dataclass(frozen=True)
class Job:
    """One client's work in a phase: the state it starts from, its first batch and how many steps it takes."""

    client: int
    start: Tree
    first_batch: int
    num_steps: int


@dataclass(frozen=True)
class Outcome:
    """What a client hands over (the update), what it keeps (its local entries) and what probes saw of its last step."""

    update: Update
    kept: Tree
    seen: Mapping[str, float] = field(default_factory=dict)


class Engine(Protocol):
    """Trains the clients of a phase; outcomes may come in any order."""

    def train(self, phase: Phase, round: int, jobs: Sequence[Job], probing: bool) -> Iterator[Outcome]: ...


def start_state(plan: Plan, schema: Schema, server: Tree, mine: Tree) -> Tree:
    """What a client starts a phase with: the server's entries, its own, or fresh ones, as the policies say."""
    state: Tree = {}
    for key, (entry, policy) in schema.items():
        if policy in (Policy.SHARED, Policy.FROZEN):
            source = server.get(key)
        elif policy is Policy.LOCAL:
            source = mine.get(key, plan.prepared.initial.get(key))
        else:
            source = plan.prepared.initial.get(key)
        # Optimizer buffers have no initial value but zero.
        state[key] = (
            torch.zeros(entry.shape, dtype=entry.dtype, device=plan.device)
            if source is None
            else source.to(plan.device, copy=True)
        )
    return state


def step_spec(plan: Plan, phase: Phase, probing: bool) -> StepSpec:
    """The static part of a phase's step."""
    return StepSpec(
        model=plan.prepared.model,
        facts=plan.prepared.facts,
        rule=phase.rule,
        optimizer=plan.optimizer,
        task=plan.task,
        keyed=plan.prepared.keyed,
        factors=lr_factors(plan.prepared, phase),
        probes=plan.probes if probing else (),
    )
