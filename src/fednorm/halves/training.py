"""Local training of one client after the other: the reference that everything else must equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from fednorm.core import rng
from fednorm.core.phases import PhaseId
from fednorm.core.probe import told
from fednorm.core.report import Report, loss_summary
from fednorm.core.state import Tree, tree_bytes
from fednorm.core.step import Batch, Carry, Seen, Step, training_mode
from fednorm.halves.messages import Update
from fednorm.halves.prepared_phase import PreparedPass, PreparedPhase
from fednorm.layers.pooling import gradients_as_images

if TYPE_CHECKING:
    from fednorm.halves.site import Sites

BUNCH_STEPS, BUNCH_BYTES = 100, 32 << 20
"""Steps and bytes of state of the clients that are made ready together, unless one alone has more."""


@dataclass(frozen=True)
class Job:
    """One client's work in a phase: the state it starts from, its first batch and how many steps each pass takes.

    The tensors of the state may be the server's own: who trains, trains copies.
    """

    client: int
    start: Tree
    first_batch: int
    steps: tuple[int, ...]
    numbers: Mapping[str, float]
    """of its steps; all clients of a round have the same, on a clock each those of the version it was sent"""

    @property
    def num_steps(self) -> int:
        return sum(self.steps)

    def first_of(self, number: int) -> int:
        """The batch that a pass begins with, or after the last one that which is left for the next job."""
        return self.first_batch + sum(self.steps[:number])


@dataclass(frozen=True, eq=False)
class Together:
    """Clients that were trained as one stack, which is sooner looked at as a whole."""

    clients: Sequence[int]
    begun: Tree
    """states with a row for each"""
    ended: Tree


@dataclass(frozen=True)
class Outcome:
    """What a client hands over (the update) and what it keeps."""

    update: Update
    kept: Tree
    together: Together | None = None
    """what both are rows of"""


@dataclass
class Training:
    """A client in the middle of its work."""

    job: Job
    carry: Carry
    losses: list[Tensor] = field(default_factory=list[Tensor])
    probed: Tree = field(default_factory=dict[str, Tensor])
    passed: int = 0
    """passes that are behind it"""

    @property
    def left(self) -> range:
        """The batches of this pass that are still to come."""
        return range(self.job.first_batch + len(self.losses), self.job.first_of(self.passed + 1))

    def take(self, carry: Carry, seen: Seen) -> None:
        self.carry = carry
        self.losses.append(seen.loss)
        self.probed = seen.probed


class Trainer:
    """Trains clients one by one on the device of their sites."""

    def __init__(self, sites: Sites) -> None:
        self.sites = sites
        # Channels last is the layout that CPU kernels of float32 convolutions, norms and poolings like best.
        self._channels_last = sites.device.type == "cpu" and sites.batches.dtype is torch.float32
        self._made: dict[tuple[PhaseId, int, bool], Step] = {}
        """the steps of the passes that were played, with and without probes"""

    def train(self, phase: PreparedPhase, jobs: Sequence[Job], probing: bool = False) -> Iterator[Outcome]:
        """The outcomes of some clients' work, in the order of the jobs."""
        for some in _bunches(jobs):
            yield from self._train_some(phase, some, probing)

    def _train_some(self, phase: PreparedPhase, jobs: Sequence[Job], probing: bool) -> list[Outcome]:
        try:
            return self.finish(phase, self.begin(phase, jobs), probing)
        except RuntimeError:
            if not self._channels_last:
                raise
        # A model that calls `view` on its activations depends on their layout; any other error comes again.
        self._channels_last = False
        return self.finish(phase, self.begin(phase, jobs), probing)

    def begin(self, phase: PreparedPhase, jobs: Sequence[Job]) -> list[Training]:
        """Clients at the start of their work, with copies of their own: layers may change what they hold in place."""
        layout = self._layout(phase)
        filters = {id(value): value for job in jobs for value in job.start.values() if value.dim() == 4}
        # What the server sent is the same tensors for all clients: those that lie otherwise are laid out once.
        laid = {name: value.clone(memory_format=layout) for name, value in filters.items()}
        owns = ({key: laid.get(id(value), value).clone() for key, value in job.start.items()} for job in jobs)
        return [Training(job, phase.passes[0].carry(own)) for job, own in zip(jobs, owns, strict=True)]

    def finish(self, phase: PreparedPhase, cohort: Sequence[Training], probing: bool) -> list[Outcome]:
        """Train each client to its end, pass by pass."""
        for number, each in enumerate(phase.passes):
            step = self._step(phase, number, probing)
            if number:
                for client in cohort:
                    client.passed = number
                    client.carry = next_pass(each, client.carry, client.job.start)
            with training_mode(self.sites.prepared.model, each.rule.hold):
                self._steps(phase, step, cohort)
        # One question for all: on a GPU it waits, on a CPU it is a call.
        lost = torch.stack([loss for client in cohort for loss in client.losses])
        losses = iter(cast(list[float], lost.tolist()))  # pyright: ignore[reportUnknownMemberType]
        return [self._outcome(phase, client, list(islice(losses, len(client.losses))), probing) for client in cohort]

    def _step(self, phase: PreparedPhase, number: int, probing: bool) -> Step:
        """The step of a pass; it knows where the model holds its tensors, which is looked for once."""
        name = phase.id, number, probing
        if name not in self._made:
            each = phase.passes[number]
            self._made[name] = each.step(self.sites.step_spec(each, probing))
        return self._made[name]

    def _steps(self, phase: PreparedPhase, step: Step, cohort: Sequence[Training]) -> None:
        sites, layout = self.sites, self._layout(phase)
        batches, seed = sites.batches, sites.work.seed
        seeds = [rng.seed(seed, "torch", each.job.client, each.job.first_of(each.passed)) for each in cohort]
        drawn = [[batches.rows_and_key(each.job.client, k) for k in each.left] for each in cohort]
        examples = batches.each(batch for taken in drawn for batch in taken)
        # Layers of other libraries may draw from torch's own generator; keyed per client, so that a resumed run and
        # another order of clients draw the same.
        pools = gradients_as_images(sites.prepared.model) if layout is torch.channels_last else nullcontext()
        with pools, torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
            # Seeding all devices costs a millisecond, as much as a small step.
            set_all = cast(Callable[[int], object], torch.manual_seed)  # pyright: ignore[reportUnknownMemberType]
            set_seed = set_all if sites.device.type != "cpu" else torch.default_generator.manual_seed
            for client, own_seed, taken in zip(cohort, seeds, drawn, strict=True):
                set_seed(own_seed)
                for _, key in taken:
                    x, y = next(examples)
                    x = x.contiguous(memory_format=layout) if x.dim() == 4 else x
                    client.take(*step(client.carry, Batch(x, y, key), client.job.numbers))

    def _layout(self, phase: PreparedPhase) -> torch.memory_format:
        """How images and filters lie."""
        together = phase.phase.lockstep
        return torch.channels_last if self._channels_last and not together else torch.contiguous_format

    def _outcome(
        self,
        phase: PreparedPhase,
        client: Training,
        losses: Sequence[float],
        probing: bool,
    ) -> Outcome:
        end = {key: value.contiguous() for key, value in client.carry.tree.items()}
        return outcome(self.sites, phase, client.job, end, losses, client.probed if probing else None)


def next_pass(each: PreparedPass, carry: Carry, start: Tree) -> Carry:
    """A client, or a stack of clients, at the start of its next pass: other entries may be trained now."""
    return each.carry(carry.tree, {key: start[key] for key, part in each.parts.items() if part == "params"})


def outcome(
    sites: Sites,
    phase: PreparedPhase,
    job: Job,
    end: Tree,
    losses: Sequence[float],
    probed: Tree | None,
    together: Together | None = None,
) -> Outcome:
    """What a client hands over after its work, and what it keeps; `probed` is None where nobody looks."""
    facts = sites.prepared.facts
    if any(each.rule.closings for each in phase.passes):
        together = None  # a closing may change what its client ends with
    for each, steps in zip(phase.passes, job.steps, strict=True):
        for closing in each.rule.closings:
            end = {**end, **closing(end, job.start, {**job.numbers, "steps": float(steps)}, facts)}
    measured = {name: measure(end, job.start, facts) for name, measure in phase.phase.measures.items()}
    report = Report(
        client=job.client,
        num_examples=sites.batches.num_examples(job.client),
        losses=loss_summary(losses, sites.batches.per_epoch(job.client)),
        scalars={name: float(value) for name, value in measured.items()},
    )
    parts = phase.split(end)
    seen = {} if probed is None else told(sites.probes, probed, end, job.start, facts)
    return Outcome(Update(report, parts.shared, parts.reported, seen), parts.kept, together)


def _bunches(jobs: Sequence[Job]) -> Iterator[Sequence[Job]]:
    """The jobs in bunches of few steps and bytes.

    A step drives everything else out of the processor's caches, so what is done before and after the steps takes a
    third of the time if it is done for several clients at once.
    """
    bunch: list[Job] = []
    steps = size = 0
    for job in jobs:
        own = tree_bytes(job.start)
        if bunch and (steps + job.num_steps > BUNCH_STEPS or size + own > BUNCH_BYTES):
            yield bunch
            bunch, steps, size = [], 0, 0
        bunch.append(job)
        steps, size = steps + job.num_steps, size + own
    yield bunch
