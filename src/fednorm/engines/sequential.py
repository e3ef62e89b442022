"""The reference engine: one client after the other, any model, any device, nothing clever."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from fednorm import rng
from fednorm.client import Step, training_mode
from fednorm.engines.base import Job, Outcome, step_spec
from fednorm.method import Phase
from fednorm.pieces.weights import Report, loss_summary
from fednorm.plan import Plan
from fednorm.server import Update, keys_with
from fednorm.state import Kind, Policy, Tree


class SequentialEngine:
    """Clients train one by one on the plan's device."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def train(self, phase: Phase, round: int, jobs: Sequence[Job], probing: bool) -> Iterator[Outcome]:
        step = phase.step(step_spec(self.plan, phase, probing))
        numbers = self.plan.numbers(phase, round)
        with training_mode(self.plan.prepared.model, phase.rule.hold):
            for job in jobs:
                yield self._train_one(phase, step, job, numbers)

    def _train_one(self, phase: Phase, step: Step, job: Job, numbers: dict[str, float]) -> Outcome:
        schema = self.plan.schema(phase)
        trained = {entry.key for entry in self.plan.prepared.trained(phase)}
        params = {key: value for key, value in job.start.items() if key in trained}
        buffers = {key: value for key, value in job.start.items() if schema[key][0].kind is Kind.OPTIMIZER}
        rest = {key: value for key, value in job.start.items() if key not in trained and key not in buffers}
        anchor = dict(params)
        losses: list[torch.Tensor] = []
        seen: Tree = {}
        # Layers of other libraries may draw from torch's own generator; keyed per client, so that a resumed run and
        # another order of clients draw the same.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rng.as_seed(rng.key(self.plan.config.seed, "torch", job.client, job.first_batch)))
            for k in range(job.first_batch, job.first_batch + job.num_steps):
                x, y, key = self.plan.batches.batch(job.client, k)
                params, rest, buffers, loss, seen = step(params, rest, buffers, anchor, x, y, key, numbers)
                losses.append(loss)
        end = {**params, **rest, **buffers}
        report = Report(
            client=job.client,
            num_examples=self.plan.batches.num_examples(job.client),
            losses=loss_summary(torch.stack(losses).tolist(), self.plan.batches.per_epoch(job.client)),
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
