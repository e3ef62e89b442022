"""All clients of a cohort at once: their states are one stack, and one step moves them all.

The step is the one the sequential engine calls, mapped over the client axis, so the two engines agree up to rounding.
Where all clients have equal work, whole rounds stay on the GPU (`engines.seat`); what is here takes any clients.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fednorm.core.method import Phase
from fednorm.core.state import Tree
from fednorm.core.step import Step, StepOut, training_mode
from fednorm.engines.base import (
    Job,
    Outcome,
    Trees,
    mapped_step,
    outcome,
    parts_of,
    pick,
    refuse_unequal,
    stack_trees,
    to_trees,
)
from fednorm.engines.sequential import SequentialEngine
from fednorm.engines.stack.kernels.layers import use_kernels
from fednorm.engines.stack.kernels.ops import HAS_TRITON
from fednorm.errors import FednormError, first_line
from fednorm.layers.cohort import set_lockstep
from fednorm.running.plan import Plan


class StackedEngine:
    """Clients train together on the plan's device, in stacks as large as memory allows."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._sequential: SequentialEngine | None = None
        self._most = len(plan.federation.clients)
        # Float32 without tf32 has no tensor cores to run on; there cuDNN's grouped convolutions are the faster ones.
        if plan.device.type == "cuda" and HAS_TRITON and plan.config.engine.precision != "fp32":
            narrow = torch.bfloat16 if plan.config.engine.precision == "bf16" else None
            use_kernels(plan.prepared.model, narrow)

    @property
    def fell_back(self) -> bool:
        """Whether the model could not be mapped over clients, so that they train one after the other."""
        return self._sequential is not None

    def train(self, phase: Phase, round: int, jobs: Sequence[Job], probing: bool) -> Iterator[Outcome]:
        if self._sequential:
            yield from self._sequential.train(phase, round, jobs, probing)
            return
        waiting = list(jobs)
        while waiting:
            part = waiting[: max(1, self._most)]
            try:
                done = self._train_stack(phase, round, part, probing)
            except torch.OutOfMemoryError:
                if len(part) == 1 or phase.lockstep:
                    raise
                torch.cuda.empty_cache()
                self._most = len(part) // 2
                continue
            except (RuntimeError, NotImplementedError) as error:
                if isinstance(error, FednormError):
                    raise
                self._fall_back(error)
                yield from self.train(phase, round, waiting, probing)
                return
            waiting = waiting[len(part) :]
            yield from done

    def _fall_back(self, error: Exception) -> None:
        why = first_line(error)
        print(f"stacked engine: the model cannot be mapped over clients ({why}); using sequential", file=sys.stderr)
        self._sequential = SequentialEngine(self.plan)

    def _train_stack(self, phase: Phase, round: int, jobs: Sequence[Job], probing: bool) -> list[Outcome]:
        step = mapped_step(self.plan, phase, probing)
        numbers = self.plan.numbers(phase, round)
        stack = to_trees(parts_of(self.plan, phase), stack_trees([job.start for job in jobs]))
        anchor = dict(stack.params)
        losses: list[list[Tensor]] = [[] for _ in jobs]
        seen: list[Tree] = [{} for _ in jobs]
        with training_mode(self.plan.prepared.model, phase.rule.hold):
            for number in range(max(job.num_steps for job in jobs)):
                together = number < phase.lockstep
                set_lockstep(self.plan.prepared.model, together)
                try:
                    for places in self._equal_batches(jobs, number, together):
                        out = self._step(step, stack, anchor, jobs, places, number, numbers)
                        stack = _put_back(stack, out, places, len(jobs))
                        for index, place in enumerate(places):
                            losses[place].append(out.loss[index])
                            seen[place] = pick(out.seen, index)
                finally:
                    set_lockstep(self.plan.prepared.model, False)
                if together and number + 1 == phase.lockstep and phase.fresh_after_lockstep:
                    fresh = {key: torch.zeros_like(value) for key, value in stack.buffers.items()}
                    stack = Trees(stack.params, stack.rest, fresh)
        states = {**stack.params, **stack.rest, **stack.buffers}
        return [
            outcome(self.plan, phase, job, pick(states, place), torch.stack(losses[place]).tolist(), seen[place])
            for place, job in enumerate(jobs)
        ]

    def _equal_batches(self, jobs: Sequence[Job], number: int, together: bool) -> list[list[int]]:
        """Places of the clients that still train, in groups whose batches have one size, as each would see alone."""
        places = [place for place, job in enumerate(jobs) if number < job.num_steps]
        clients = [jobs[place].client for place in places]
        sizes = self.plan.batches.sizes(clients, [jobs[place].first_batch + number for place in places])
        if together:
            refuse_unequal(self.plan.method.name, clients, sizes)
        groups: dict[int, list[int]] = defaultdict(list)
        for place, size in zip(places, sizes, strict=True):
            groups[size].append(place)
        return list(groups.values())

    def _step(
        self,
        step: Step,
        stack: Trees,
        anchor: Tree,
        jobs: Sequence[Job],
        places: list[int],
        number: int,
        numbers: dict[str, float],
    ) -> StepOut:
        clients = [jobs[place].client for place in places]
        x, y, keys = self.plan.batches.stack(clients, [jobs[place].first_batch + number for place in places])
        params, rest, buffers = stack.params, stack.rest, stack.buffers
        if len(places) < len(jobs):
            index = torch.tensor(places, device=x.device)
            some = [{key: value[index] for key, value in tree.items()} for tree in (params, rest, buffers, anchor)]
            params, rest, buffers, anchor = some
        return step(params, rest, buffers, anchor, x, y, keys, numbers)


def _put_back(stack: Trees, out: StepOut, places: list[int], count: int) -> Trees:
    """The stack with some clients' rows replaced; the others rest, untouched to the bit."""
    if len(places) == count:
        return Trees(out.params, out.rest, out.buffers)
    first = next(iter(out.params.values()), out.loss)
    index = torch.tensor(places, device=first.device)

    def rows(old: Tree, key: str, new: Tensor) -> Tensor:
        """What was there; of state that a step has just begun to keep, zeros."""
        return old[key] if key in old else new.new_zeros(count, *new.shape[1:])

    def put(old: Tree, new: Tree) -> Tree:
        olds = {key: rows(old, key, value) for key, value in new.items()}
        return {key: olds[key].index_copy(0, index, value.to(olds[key].dtype)) for key, value in new.items()}

    return Trees(put(stack.params, out.params), put(stack.rest, out.rest), put(stack.buffers, out.buffers))
