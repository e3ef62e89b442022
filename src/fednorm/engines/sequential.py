"""The reference engine: one client after the other, any model, any device, nothing clever."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.func import grad_and_value

from fednorm import rng
from fednorm.client import Step, StepOut, training_mode
from fednorm.engines.base import Job, Outcome, step_spec
from fednorm.errors import ConfigError
from fednorm.layers.cohort import set_lockstep
from fednorm.method import Phase
from fednorm.pieces.weights import Report, loss_summary
from fednorm.plan import Plan
from fednorm.server import Update, keys_with
from fednorm.state import Kind, Policy, Tree


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

    def take(self, out: StepOut) -> None:
        self.params, self.rest, self.buffers, loss, self.seen = out
        self.losses.append(loss)


class SequentialEngine:
    """Clients train one by one on the plan's device."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def train(self, phase: Phase, round: int, jobs: Sequence[Job], probing: bool) -> Iterator[Outcome]:
        step = phase.step(step_spec(self.plan, phase, probing))
        numbers = self.plan.numbers(phase, round)
        with training_mode(self.plan.prepared.model, phase.rule.hold):
            if phase.lockstep:
                cohort = [self._begin(phase, job) for job in jobs]
                self._step_together(phase, cohort, numbers, probing)
                for client in cohort:
                    yield self._finish(phase, step, client, numbers)
            else:
                for job in jobs:
                    yield self._finish(phase, step, self._begin(phase, job), numbers)

    def _begin(self, phase: Phase, job: Job) -> Training:
        schema = self.plan.schema(phase)
        trained = {entry.key for entry in self.plan.prepared.trained(phase)}
        params = {key: value for key, value in job.start.items() if key in trained}
        buffers = {key: value for key, value in job.start.items() if schema[key][0].kind is Kind.OPTIMIZER}
        rest = {key: value.clone() for key, value in job.start.items() if key not in trained and key not in buffers}
        return Training(job, params, rest, buffers, dict(params))

    def _step_together(
        self, phase: Phase, cohort: Sequence[Training], numbers: dict[str, float], probing: bool
    ) -> None:
        """The first steps of a cohort in lock-step, as one small stack: a mean over the clients needs them all."""
        spec = replace(step_spec(self.plan, phase, probing), differentiate=lambda f: grad_and_value(f, has_aux=True))
        together = torch.vmap(phase.step(spec), in_dims=(0, 0, 0, 0, 0, 0, 0, None))
        set_lockstep(self.plan.prepared.model, True)
        try:
            for number in range(min(phase.lockstep, *(client.job.num_steps for client in cohort))):
                batches = [self.plan.batches.batch(c.job.client, c.job.first_batch + number) for c in cohort]
                _refuse_unequal(self.plan.method.name, cohort, [len(x) for x, _, _ in batches])
                stacks = [
                    _stack([getattr(c, part) for c in cohort]) for part in ("params", "rest", "buffers", "anchor")
                ]
                x, y, key = (torch.stack(items) for items in zip(*batches, strict=True))
                out = together(*stacks, x, y, key, numbers)
                for place, client in enumerate(cohort):
                    client.take(_pick(out, place))
        finally:
            set_lockstep(self.plan.prepared.model, False)
        if phase.fresh_after_lockstep:
            for client in cohort:
                client.buffers = {key: torch.zeros_like(value) for key, value in client.buffers.items()}

    def _finish(self, phase: Phase, step: Step, client: Training, numbers: dict[str, float]) -> Outcome:
        job, plan = client.job, self.plan
        # Layers of other libraries may draw from torch's own generator; keyed per client, so that a resumed run and
        # another order of clients draw the same.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rng.as_seed(rng.key(plan.config.seed, "torch", job.client, job.first_batch)))
            for k in range(job.first_batch + len(client.losses), job.first_batch + job.num_steps):
                x, y, key = plan.batches.batch(job.client, k)
                client.take(step(client.params, client.rest, client.buffers, client.anchor, x, y, key, numbers))
        end = {**client.params, **client.rest, **client.buffers}
        schema = plan.schema(phase)
        measured = {name: measure(end, job.start, plan.prepared.facts) for name, measure in phase.measures.items()}
        report = Report(
            client=job.client,
            num_examples=plan.batches.num_examples(job.client),
            losses=loss_summary(torch.stack(client.losses).tolist(), plan.batches.per_epoch(job.client)),
            scalars={name: float(value) for name, value in measured.items()},
        )
        return Outcome(
            update=Update(
                report,
                shared={key: end[key] for key in keys_with(schema, Policy.SHARED)},
                reported={key: end[key] for key in keys_with(schema, Policy.REPORTED)},
            ),
            kept={key: end[key] for key in keys_with(schema, Policy.LOCAL)},
            seen={name: float(value) for name, value in client.seen.items()},
        )


def _refuse_unequal(method: str, cohort: Sequence[Training], sizes: Sequence[int]) -> None:
    for client, size in zip(cohort, sizes, strict=True):
        if size != sizes[0]:
            raise ConfigError(
                f"'{method}' steps in lock-step and needs equal batches, but client {client.job.client} has {size} "
                f"examples where client {cohort[0].job.client} has {sizes[0]}; lower train.batch_size to {min(sizes)}"
            )


def _stack(trees: Sequence[Tree]) -> Tree:
    return {key: torch.stack([tree[key] for tree in trees]) for key in trees[0]}


def _pick(out: StepOut, place: int) -> StepOut:
    trees = [{key: value[place].clone() for key, value in tree.items()} for tree in (out.params, out.rest, out.buffers)]
    return StepOut(*trees, out.loss[place], {key: value[place] for key, value in out.seen.items()})
