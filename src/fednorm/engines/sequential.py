"""The reference engine: one client after the other, any model, any device, nothing clever."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fednorm.core import rng
from fednorm.core.method import Phase
from fednorm.core.state import Tree, tree_bytes
from fednorm.core.step import Step, StepOut, training_mode
from fednorm.engines.base import (
    Job,
    Outcome,
    mapped_step,
    outcome,
    parts_of,
    pick_client,
    refuse_unequal,
    stack_trees,
    step_spec,
    to_trees,
)
from fednorm.layers.cohort import set_lockstep
from fednorm.running.plan import Plan

BUNCH_STEPS, BUNCH_BYTES = 100, 32 << 20
"""Steps and bytes of state of the clients that are made ready together, unless one alone has more."""


@dataclass
class Training:
    """A client in the middle of its work."""

    job: Job
    params: Tree
    rest: Tree
    buffers: Tree
    anchor: Tree
    losses: list[Tensor] = field(default_factory=list)
    seen: Tree = field(default_factory=dict)

    @property
    def left(self) -> range:
        """The batches that are still to come."""
        return range(self.job.first_batch + len(self.losses), self.job.first_batch + self.job.num_steps)

    def take(self, out: StepOut) -> None:
        self.params, self.rest, self.buffers, loss, self.seen = out
        self.losses.append(loss)


class SequentialEngine:
    """Clients train one by one on the plan's device."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        # Channels last is the layout that CPU kernels of float32 convolutions, norms and poolings like best.
        self._channels_last = plan.device.type == "cpu" and plan.batches.dtype is torch.float32

    def train(self, phase: Phase, round: int, jobs: Sequence[Job], probing: bool) -> Iterator[Outcome]:
        step = phase.step(step_spec(self.plan, phase, probing))
        numbers = self.plan.numbers(phase, round)
        with training_mode(self.plan.prepared.model, phase.rule.hold):
            if phase.lockstep:
                cohort = self._begin(phase, jobs)
                self._step_together(phase, cohort, numbers, probing)
                yield from self._finish(phase, step, cohort, numbers)
            else:
                for some in _bunches(jobs):
                    yield from self._train_some(phase, step, some, numbers)

    def _train_some(self, phase: Phase, step: Step, jobs: Sequence[Job], numbers: dict[str, float]) -> list[Outcome]:
        try:
            return self._finish(phase, step, self._begin(phase, jobs), numbers)
        except RuntimeError:
            if not self._channels_last:
                raise
        # A model that calls `view` on its activations depends on their layout; any other error comes again.
        self._channels_last = False
        return self._finish(phase, step, self._begin(phase, jobs), numbers)

    def _begin(self, phase: Phase, jobs: Sequence[Job]) -> list[Training]:
        """Clients at the start of their work, with copies of their own: layers may change what they hold in place."""
        layout, parts = self._layout(phase), parts_of(self.plan, phase)
        cohort = []
        for job in jobs:
            own = {
                key: value.clone(memory_format=layout) if value.dim() == 4 else value.clone()
                for key, value in job.start.items()
            }
            trees = to_trees(parts, own)
            cohort.append(Training(job, trees.params, trees.rest, trees.buffers, dict(trees.params)))
        return cohort

    def _layout(self, phase: Phase) -> torch.memory_format:
        """How images and filters lie."""
        return torch.channels_last if self._channels_last and not phase.lockstep else torch.contiguous_format

    def _step_together(
        self, phase: Phase, cohort: Sequence[Training], numbers: dict[str, float], probing: bool
    ) -> None:
        """The first steps of a cohort in lock-step, as one small stack: a mean over the clients needs them all."""
        together = mapped_step(self.plan, phase, probing)
        clients = [client.job.client for client in cohort]
        set_lockstep(self.plan.prepared.model, True)
        try:
            for number in range(min(phase.lockstep, *(client.job.num_steps for client in cohort))):
                ks = [client.job.first_batch + number for client in cohort]
                refuse_unequal(self.plan.method.name, clients, self.plan.batches.sizes(clients, ks))
                parts = [[c.params for c in cohort], [c.rest for c in cohort], [c.buffers for c in cohort]]
                params, rest, buffers = (stack_trees(trees) for trees in parts)
                anchor = stack_trees([client.anchor for client in cohort])
                out = together(params, rest, buffers, anchor, *self.plan.batches.stack(clients, ks), numbers)
                for place, client in enumerate(cohort):
                    client.take(pick_client(out, place))
        finally:
            set_lockstep(self.plan.prepared.model, False)
        if phase.fresh_after_lockstep:
            for client in cohort:
                client.buffers = {key: torch.zeros_like(value) for key, value in client.buffers.items()}

    def _finish(self, phase: Phase, step: Step, cohort: Sequence[Training], numbers: dict[str, float]) -> list[Outcome]:
        """Train each client to its end."""
        plan, seed, layout = self.plan, self.plan.config.seed, self._layout(phase)
        seeds = [rng.as_seed(rng.key(seed, "torch", each.job.client, each.job.first_batch)) for each in cohort]
        places = [[plan.batches.place(each.job.client, k) for k in each.left] for each in cohort]
        # Layers of other libraries may draw from torch's own generator; keyed per client, so that a resumed run and
        # another order of clients draw the same.
        with torch.random.fork_rng(devices=[]):
            # Seeding all devices costs a millisecond, as much as a small step.
            set_seed = torch.manual_seed if plan.device.type != "cpu" else torch.default_generator.manual_seed
            for client, own_seed, batches in zip(cohort, seeds, places, strict=True):
                set_seed(own_seed)
                for rows, key in batches:
                    x, y = plan.batches.take(rows, key)
                    x = x.contiguous(memory_format=layout) if x.dim() == 4 else x
                    client.take(step(client.params, client.rest, client.buffers, client.anchor, x, y, key, numbers))
        return [self._outcome(phase, client) for client in cohort]

    def _outcome(self, phase: Phase, client: Training) -> Outcome:
        end = {**client.params, **client.rest, **client.buffers}
        end = {key: value.contiguous() for key, value in end.items()}
        return outcome(self.plan, phase, client.job, end, torch.stack(client.losses).tolist(), client.seen)


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
