"""All clients of a cohort at once: their states are one stack, and one step moves them all.

The step is the one the sequential engine calls, mapped over the client axis, so the two engines agree up to rounding.
Whole rounds stay on the GPU where they can (`slot`, `device_stack`); the training here takes any clients, step by step.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property

import torch
from torch import Tensor

from fednorm.core.state import Tree
from fednorm.core.step import Batch, Carry, Seen, Step, training_mode
from fednorm.engines.base import (
    ClientStates,
    Order,
    Played,
    attempt,
    mapped_step,
    pick,
    play_plainly,
    refuse_unequal,
    stack_trees,
)
from fednorm.engines.machine import narrow_type
from fednorm.engines.sequential import SequentialEngine
from fednorm.engines.stack.attributes import ChangesItself, unchanged
from fednorm.engines.stack.device_stack import DEVICES, DeviceStack
from fednorm.engines.stack.jobs import WORTH, JobStacks
from fednorm.engines.stack.kernels.layers import kernels_pay, use_kernels
from fednorm.engines.stack.kernels.swapped import restore
from fednorm.engines.stack.lost_writes import LostWritesRefused
from fednorm.engines.stack.merged_outside import play_from_slot
from fednorm.engines.stack.slot import StackSlot, can_stay, exchange_on_device, slot_of
from fednorm.engines.stack.slow_operators import slow_operators_named
from fednorm.errors import ConfigError, FednormError, first_line
from fednorm.halves.exchange import Held, Holder
from fednorm.halves.prepared_phase import PreparedPass, PreparedPhase
from fednorm.halves.site import Sites
from fednorm.halves.training import Job, Outcome, next_pass, outcome
from fednorm.layers.cohort import set_lockstep


class StackedEngine:
    """Clients train together on their device, in stacks as large as memory allows; so do runs of the same program.

    It works on a copy of the model, whose layers it may replace by ones that kernels serve. `stays` says whether
    rounds may be played on the device from end to end.
    """

    processes = 1
    independent = False

    def __init__(self, runs: Sequence[Sites], *, precision: str = "fp32", stays: bool = True) -> None:
        narrow = narrow_type(precision)
        own = [sites.with_own_model() for sites in runs]
        if kernels_pay(runs[0].device, precision):
            for sites in own:
                use_kernels(sites.prepared.model, narrow)
        each = zip(runs, own, strict=True)
        self._trainers = {id(sites): StackTrainer(mine, sites, precision) for sites, mine in each}
        self._jobs = JobStacks(own[0])
        self._runs = {id(sites): number for number, sites in enumerate(runs)}
        self._own, self._stays = own, stays
        self._can_stay = all(map(can_stay, runs))
        if runs[0].device.type in DEVICES and runs[0].batches.pool.live:
            print("stacked engine: data are read as they are needed; clients are stacked step by step", file=sys.stderr)
        if self._can_stay and len(runs) > 1:
            print(f"stacked engine: {len(runs)} runs are the same program and share one stack", file=sys.stderr)

    @property
    def fell_back(self) -> str:
        """Why the model could not be mapped over clients, so that they train one after the other."""
        return next((trainer.fell_back for trainer in self._trainers.values() if trainer.fell_back), "")

    def ahead(self, phase: PreparedPhase) -> int:
        return WORTH if self._jobs.may_train(phase) else 0

    def urgent(self) -> AbstractContextManager[None]:
        return self._jobs.urgent()

    @cached_property
    def _stack(self) -> DeviceStack | None:
        """Where runs lie that are held here; one on a clock is not."""
        return DeviceStack(self._own, self._stays) if self._can_stay else None

    def hold(self, sites: Sites, tree: Tree, memory: Tree) -> Holder:
        if self._stack is None:
            return Held(tree, memory)
        slot = StackSlot(self._stack, self._runs[id(sites)])
        slot.tree, slot.memory = tree, memory
        return slot

    def train(self, phase: PreparedPhase, jobs: Sequence[Job], probing: bool = False) -> Iterator[Outcome]:
        """The outcomes of work of the first run's clients, which is all there are on a clock or where it is tried."""
        trainer = next(iter(self._trainers.values()))
        if probing or not self._jobs.can_train(phase):
            return trainer.train(phase, jobs, probing)
        return self._jobs.train(phase, jobs, trainer.train)

    def exchange(self, orders: Sequence[Order]) -> list[Played | FednormError]:
        played: dict[int, Played | FednormError] = {}
        if self._stack is not None:
            played = exchange_on_device(self._stack, orders)
        for number, order in enumerate(orders):
            if number not in played:
                played[number] = attempt(self._play_plainly, order)
        return [played[number] for number in range(len(orders))]

    def _play_plainly(self, order: Order) -> Played:
        """An exchange that is merged on the host, by whatever way its clients train."""
        trainer, slot = self._trainers[id(order.sites)], slot_of(order)
        if slot is not None:
            return play_from_slot(order, slot, trainer.train)
        self.bring_home(order.states, order.server.held)
        done = play_plainly(order, trainer.train)
        if isinstance(order.server.held, StackSlot) and order.exchange.keeps:
            order.server.held.forget(order.exchange.cohort)
        return done

    def bring_home(self, states: ClientStates, held: Holder) -> None:
        if isinstance(held, StackSlot):
            held.bring_home(states)

    def close(self) -> None:
        """Nothing is held beside memory."""


class StackTrainer:
    """Trains clients of one run in stacks, step by step."""

    def __init__(self, sites: Sites, whole: Sites, precision: str = "fp32") -> None:
        self.sites = sites
        self.fell_back = ""
        self._whole = whole
        """the same with the run's own model"""
        self._precision = precision
        self._sequential: SequentialEngine | None = None
        self._restored = False
        self._failed = ""
        """why a stack could not be trained, as long as nothing was said of it"""
        self._tried = False
        """whether a step has shown that the model changes nothing but its state"""
        self._most = sys.maxsize

    def train(self, phase: PreparedPhase, jobs: Sequence[Job], probing: bool = False) -> Iterator[Outcome]:
        for some in _by_numbers(jobs):
            yield from self._train_alike(phase, some, probing)

    def _train_alike(self, phase: PreparedPhase, jobs: Sequence[Job], probing: bool) -> Iterator[Outcome]:
        """Train clients whose steps have the same numbers, as all of a round have."""
        if self._sequential:
            try:
                for done in self._sequential.train(phase, jobs, probing):
                    if self._failed:
                        self._say("using sequential")
                    yield done
            except Exception:
                if self._failed:  # it was not for the mapping that training failed
                    self._sequential, self.fell_back, self._failed = None, "", ""
                raise
            return
        waiting = list(jobs)
        while waiting:
            part = waiting[: max(1, self._most)]
            try:
                done = self._train_stack(phase, part, probing)
            except torch.OutOfMemoryError:
                if len(part) == 1 or phase.phase.lockstep:
                    raise
                torch.cuda.empty_cache()
                self._most = len(part) // 2
                continue
            except FednormError:
                raise
            except Exception as error:  # of the mapping, of a kernel, or of the model itself, which then comes again
                self._fall_back(error)
                yield from self._train_alike(phase, waiting, probing)
                return
            if self._failed:
                self._say("using torch's own layers")
            waiting = waiting[len(part) :]
            yield from done

    def _fall_back(self, error: Exception) -> None:
        """Go on with torch's own layers where others were in their place, else one client after the other."""
        self._failed = self._failed or first_line(error)
        self._restored = bool(restore(self.sites.prepared.model))
        wider = self._precision == "bf16"
        if self._restored and not wider and not isinstance(error, ChangesItself):
            return
        self.fell_back = f"the model cannot be mapped over clients ({self._failed})"
        if wider:
            raise ConfigError(
                f"stacked engine: {self.fell_back}, and other ways of training have no bf16; "
                "give engine.precision=tf32 or fp32"
            ) from error
        restore(self._whole.prepared.model)
        self._sequential = SequentialEngine(self._whole)

    def _say(self, how: str) -> None:
        print(f"stacked engine: the model cannot be mapped over clients ({self._failed}); {how}", file=sys.stderr)
        self._failed = ""

    def _train_stack(self, phase: PreparedPhase, jobs: Sequence[Job], probing: bool) -> list[Outcome]:
        start = stack_trees([job.start for job in jobs])
        if self._restored:  # torch's own layers cannot all be mapped over what lies as kernels read it
            start = {key: value.clone(memory_format=torch.contiguous_format) for key, value in start.items()}
        carry = phase.passes[0].carry(start)
        losses: list[list[Tensor]] = [[] for _ in jobs]
        probed: list[Tree] = [{} for _ in jobs]
        for number, each in enumerate(phase.passes):
            if number:
                carry = next_pass(each, carry, start)
            carry = self._pass(phase, each, number, carry, jobs, probing, losses, probed)
        states = carry.tree
        seen = probed if probing else [None] * len(jobs)
        return [
            outcome(self.sites, phase, job, pick(states, row), torch.stack(losses[row]).tolist(), seen[row])
            for row, job in enumerate(jobs)
        ]

    def _pass(
        self,
        phase: PreparedPhase,
        each: PreparedPass,
        number: int,
        carry: Carry,
        jobs: Sequence[Job],
        probing: bool,
        losses: list[list[Tensor]],
        probed: list[Tree],
    ) -> Carry:
        """One pass of all clients; losses and what probes saw go into the lists."""
        step = mapped_step(self.sites, each, probing)
        model, lockstep = self.sites.prepared.model, phase.phase.lockstep
        firsts = [job.first_of(number) for job in jobs]
        counts = [job.steps[number] for job in jobs]
        groups = [self._equal_batches(jobs, firsts, counts, turn, turn < lockstep) for turn in range(max(counts))]
        batches = self.sites.batches.stacks(
            ([jobs[row].client for row in group], [firsts[row] + turn for row in group])
            for turn, some in enumerate(groups)
            for group in some
        )
        with training_mode(model, each.rule.hold), slow_operators_named(model):
            for turn, some in enumerate(groups):
                together = turn < lockstep
                set_lockstep(model, together)
                try:
                    for group in some:
                        new, seen = self._step(step, carry, Batch(*next(batches)), group, len(jobs), jobs[0].numbers)
                        carry = _put_back(carry, new, group, len(jobs))
                        for index, row in enumerate(group):
                            losses[row].append(seen.loss[index])
                            probed[row] = pick(seen.probed, index)
                finally:
                    set_lockstep(model, False)
                if together and turn + 1 == lockstep and phase.phase.fresh_after_lockstep:
                    fresh = {key: torch.zeros_like(value) for key, value in carry.optimizer.items()}
                    carry = carry._replace(optimizer=fresh)
        return carry

    def _equal_batches(
        self, jobs: Sequence[Job], firsts: Sequence[int], counts: Sequence[int], turn: int, together: bool
    ) -> list[list[int]]:
        """Rows of the clients that still train, in groups whose batches have one size, as each would see alone."""
        rows = [row for row, count in enumerate(counts) if turn < count]
        clients = [jobs[row].client for row in rows]
        sizes = self.sites.batches.sizes(clients, [firsts[row] + turn for row in rows])
        if together:
            refuse_unequal(self.sites.method.name, clients, sizes)
        groups: dict[int, list[int]] = defaultdict(list)
        for row, size in zip(rows, sizes, strict=True):
            groups[size].append(row)
        return list(groups.values())

    def _step(
        self,
        step: Step,
        carry: Carry,
        batch: Batch,
        rows: list[int],
        count: int,
        numbers: Mapping[str, float],
    ) -> tuple[Carry, Seen]:
        """One step of some of the clients in the stack, of which there are `count`."""
        if len(rows) < count:
            index = torch.tensor(rows, device=batch.x.device)
            carry = Carry(*({key: value[index] for key, value in tree.items()} for tree in carry))
        if self._tried:
            return step(carry, batch, numbers)
        with unchanged(self.sites.prepared.model), LostWritesRefused():
            done = step(carry, batch, numbers)
        self._tried = True
        return done


def _by_numbers(jobs: Sequence[Job]) -> list[list[Job]]:
    """Jobs in groups, each of those whose steps have the same numbers."""
    groups: dict[tuple[tuple[str, float], ...], list[Job]] = {}
    for job in jobs:
        groups.setdefault(tuple(job.numbers.items()), []).append(job)
    return list(groups.values())


def _put_back(stack: Carry, new: Carry, rows: list[int], count: int) -> Carry:
    """The stack with some clients' rows replaced; the others rest, untouched to the bit."""
    if len(rows) == count:
        return new
    first = next(iter(new.tree.values()))
    index = torch.tensor(rows, device=first.device)

    def before(old: Tree, key: str, value: Tensor) -> Tensor:
        """What was there; of state that a step has just begun to keep, zeros."""
        return old[key] if key in old else value.new_zeros(count, *value.shape[1:])

    def put(old: Tree, moved: Tree) -> Tree:
        olds = {key: before(old, key, value) for key, value in moved.items()}
        return {key: olds[key].index_copy(0, index, value.to(olds[key].dtype)) for key, value in moved.items()}

    parts = (put(old, moved) for old, moved in zip(stack[:-1], new[:-1], strict=True))
    return Carry(*parts, anchor=stack.anchor)
