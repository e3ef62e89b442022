"""What an engine is: it trains a cohort of clients for one phase. Everything else about a round is the same for all."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, auto
from typing import Protocol

import torch
from torch.func import grad_and_value

from fednorm.core.method import Phase
from fednorm.core.report import Report, loss_summary
from fednorm.core.state import Entry, Kind, Policy, Tree
from fednorm.core.step import Step, StepOut, StepSpec
from fednorm.errors import ConfigError
from fednorm.halves.merging import DOWN, Schema, Update, keys_with
from fednorm.halves.prepared import lr_factors
from fednorm.running.plan import Plan


@dataclass(frozen=True)
class Job:
    """One client's work in a phase: the state it starts from, its first batch and how many steps it takes.

    The tensors of the state may be the server's own: an engine trains copies.
    """

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
    return {key: value.clone() for key, value in start_view(plan, schema, server, mine).items()}


class Source(IntEnum):
    """Where an entry comes from when a client starts a phase."""

    SERVER = auto()
    OWN = auto()
    INITIAL = auto()
    ZEROS = auto()
    """as optimizer buffers do, which have no initial value but zero"""


def source_of(key: str, policy: Policy, initial: Container[str]) -> Source:
    """Where an entry with this policy comes from, `initial` being the keys that have an initial value."""
    if policy in DOWN:
        return Source.SERVER
    if policy is Policy.LOCAL:
        return Source.OWN
    return Source.INITIAL if key in initial else Source.ZEROS


def start_view(plan: Plan, schema: Schema, server: Tree, mine: Tree) -> Tree:
    """`start_state` without copies, for those who change no tensor in place."""
    initial = plan.prepared.initial
    trees = {Source.SERVER: server, Source.OWN: {**initial, **mine}, Source.INITIAL: initial, Source.ZEROS: {}}
    state: Tree = {}
    for key, (entry, policy) in schema.items():
        value = trees[source_of(key, policy, initial)].get(key)
        state[key] = (
            torch.zeros(entry.shape, dtype=entry.dtype, device=plan.device) if value is None else value.to(plan.device)
        )
    return state


def start_views(plan: Plan, schema: Schema, server: Tree, each: Sequence[Tree]) -> list[Tree]:
    """`start_view` of many clients with these own states; what is not their own is the same tensors for all."""
    common = start_view(plan, schema, server, {})
    local = keys_with(schema, Policy.LOCAL)
    return [{**common, **{key: mine[key].to(plan.device) for key in local if key in mine}} for mine in each]


def step_spec(plan: Plan, phase: Phase, probing: bool) -> StepSpec:
    """The static part of a phase's step."""
    return StepSpec(
        model=plan.prepared.model,
        facts=plan.prepared.facts,
        rule=phase.rule,
        optimizer=plan.optimizer,
        task=plan.task,
        tied=plan.prepared.tied,
        keyed=plan.prepared.keyed,
        factors=lr_factors(plan.prepared, phase),
        spared=frozenset() if plan.config.train.decay_vectors else plan.prepared.vectors,
        probes=plan.probes if probing else (),
    )


@dataclass(frozen=True)
class Trees:
    """A client's state (or a stack of clients' states) as a step takes it."""

    params: Tree
    rest: Tree
    buffers: Tree


def to_trees(parts: Mapping[str, str], state: Tree) -> Trees:
    """Sort a state into what is trained, what the optimizer keeps, and the rest, as `parts_of` names them.

    The rest must be copies made for the training: layers move their running statistics in place.
    """
    trees = Trees({}, {}, {})
    for key, part in parts.items():
        getattr(trees, part)[key] = state[key]
    return trees


def parts_of(plan: Plan, phase: Phase) -> dict[str, str]:
    """Which of the `Trees` each entry of a phase belongs to."""
    trained = {entry.key for entry in plan.prepared.trained(phase)}

    def part(entry: Entry) -> str:
        return "params" if entry.key in trained else "buffers" if entry.kind is Kind.OPTIMIZER else "rest"

    return {key: part(entry) for key, (entry, _) in plan.schema(phase).items()}


def outcome(plan: Plan, phase: Phase, job: Job, end: Tree, losses: Sequence[float], seen: Tree) -> Outcome:
    """What a client hands over after its work, and what it keeps."""
    schema = plan.schema(phase)
    measured = {name: measure(end, job.start, plan.prepared.facts) for name, measure in phase.measures.items()}
    report = Report(
        client=job.client,
        num_examples=plan.batches.num_examples(job.client),
        losses=loss_summary(losses, plan.batches.per_epoch(job.client)),
        scalars={name: float(value) for name, value in measured.items()},
    )
    return Outcome(
        update=Update(
            report,
            shared={key: end[key] for key in keys_with(schema, Policy.SHARED)},
            reported={key: end[key] for key in keys_with(schema, Policy.REPORTED)},
        ),
        kept={key: end[key] for key in keys_with(schema, Policy.LOCAL)},
        seen={name: float(value) for name, value in seen.items()},
    )


def mapped_spec(plan: Plan, phase: Phase, probing: bool) -> StepSpec:
    """`step_spec` for a step that will be mapped over clients."""
    return replace(step_spec(plan, phase, probing), differentiate=lambda f: grad_and_value(f, has_aux=True))


def mapped_step(plan: Plan, phase: Phase, probing: bool) -> Step:
    """The phase's step over a stack of clients: every tensor has a leading client axis, numbers are common."""
    return torch.vmap(phase.step(mapped_spec(plan, phase, probing)), in_dims=(0, 0, 0, 0, 0, 0, 0, None))


def stack_trees(trees: Sequence[Tree]) -> Tree:
    """Trees of several clients as one tree with a leading client axis."""
    return {key: torch.stack([tree[key] for tree in trees]) for key in trees[0]}


def pick(tree: Tree, place: int) -> Tree:
    """One client's tree of a stack."""
    return {key: value[place] for key, value in tree.items()}


def pick_client(out: StepOut, place: int) -> StepOut:
    """One client's part of what a mapped step leaves."""
    params, rest, buffers = (pick(tree, place) for tree in (out.params, out.rest, out.buffers))
    return StepOut(params, rest, buffers, out.loss[place], pick(out.seen, place))


def refuse_unequal(method: str, clients: Sequence[int], sizes: Sequence[int]) -> None:
    """Clients that step together inside one layer need batches of one size."""
    for client, size in zip(clients, sizes, strict=True):
        if size != sizes[0]:
            raise ConfigError(
                f"'{method}' steps in lock-step and needs equal batches, but client {client} has {size} "
                f"examples where client {clients[0]} has {sizes[0]}; lower train.batch_size to {min(sizes)}"
            )
