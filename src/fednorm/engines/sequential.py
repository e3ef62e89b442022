"""The reference engine: one client after the other, any model, any device, nothing clever."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from fednorm.core.step import Batch, Carry, training_mode
from fednorm.engines.base import PlainEngine, mapped_step, pick_client, refuse_unequal, stack_trees
from fednorm.halves.prepared_phase import PreparedPhase
from fednorm.halves.site import Sites
from fednorm.halves.training import Job, Outcome, Trainer, Training
from fednorm.layers.cohort import set_lockstep


class SequentialEngine(PlainEngine):
    """Clients train one by one, as each would at its own site."""

    def __init__(self, sites: Sites) -> None:
        self.sites = sites
        self._trainer = Trainer(sites)

    def train(self, phase: PreparedPhase, jobs: Sequence[Job], probing: bool = False) -> Iterator[Outcome]:
        if not phase.phase.lockstep:
            yield from self._trainer.train(phase, jobs, probing)
            return
        cohort = self._trainer.begin(phase, jobs)
        self._step_together(phase, cohort, probing)
        yield from self._trainer.finish(phase, cohort, probing)

    def _step_together(self, phase: PreparedPhase, cohort: Sequence[Training], probing: bool) -> None:
        """The first steps of a cohort in lock-step, as one small stack: a mean over the clients needs them all."""
        (only,) = phase.passes
        batches, model = self.sites.batches, self.sites.prepared.model
        together = mapped_step(self.sites, only, probing)
        clients, numbers = [client.job.client for client in cohort], cohort[0].job.numbers
        with training_mode(model, only.rule.hold):
            set_lockstep(model, True)
            try:
                for number in range(min(phase.phase.lockstep, *(client.job.num_steps for client in cohort))):
                    ks = [client.job.first_batch + number for client in cohort]
                    refuse_unequal(self.sites.method.name, clients, batches.sizes(clients, ks))
                    stack = Carry(*(stack_trees(trees) for trees in zip(*(each.carry for each in cohort), strict=True)))
                    after, seen = together(stack, Batch(*batches.stack(clients, ks)), numbers)
                    for index, client in enumerate(cohort):
                        client.take(*pick_client(after, seen, index))
            finally:
                set_lockstep(model, False)
        if phase.phase.fresh_after_lockstep:
            for client in cohort:
                client.carry = client.carry._replace(
                    optimizer={key: torch.zeros_like(value) for key, value in client.carry.optimizer.items()}
                )
