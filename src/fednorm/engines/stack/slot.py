"""A run's place among those whose rounds stay on the device, and what is newer there than in its store."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fednorm.core.state import Policy, Tree
from fednorm.data.batches import UNION
from fednorm.engines.stack.device_stack import (
    DEVICES,
    MOST_LOCAL_BYTES,
    DeviceStack,
    LateReports,
    Task,
    Work,
    entries_with,
)
from fednorm.engines.stack.kernels.layers import StackConv2d
from fednorm.engines.stack.phase_program import NotAProgram
from fednorm.errors import FednormError, first_line
from fednorm.halves.merging import keys_with
from fednorm.running.plan import Plan
from fednorm.running.store import ClientState, Store


class BatchKey(NamedTuple):
    """What tasks of one exchange have in common."""

    device_stack: int
    work: Work
    remembered: frozenset[str]
    run: int | None
    """clients with unequal work do not share a stack with those of other runs"""


@dataclass
class StackSlot:
    """Run number `run` of a resident."""

    device_stack: DeviceStack
    run: int
    away: dict[int, int] = field(default_factory=dict)
    """clients whose newest state is on the device, and how many batches of their lives they have used"""
    _here: set[int] = field(default_factory=set)
    """clients whose state on the device is their newest"""
    _kept: dict[int, set[str]] = field(default_factory=dict)
    _alone: dict[tuple[str, int, int], bool] = field(default_factory=dict)
    """whether clients of a phase can work each for itself, with state that has its place here"""

    @property
    def plan(self) -> Plan:
        return self.device_stack.plans[self.run]

    @property
    def server(self) -> Tree:
        return self.device_stack.server(self.run)

    @server.setter
    def server(self, tree: Tree) -> None:
        self.device_stack.load_server(self.run, tree)

    @property
    def memory(self) -> Tree:
        return self.device_stack.memory(self.run)

    @memory.setter
    def memory(self, tree: Tree) -> None:
        self.device_stack.load_memory(self.run, tree)

    def alike(self, task: Task) -> BatchKey | None:
        """What tasks must have in common to be one exchange; None for one that cannot be played on the device."""
        if task.place in self.device_stack.refused or not self._each_alone(task):
            return None
        work = self._work(task)
        if not self.device_stack.pays(work):
            return None
        own = self.run if work.steps is None else None
        return BatchKey(id(self.device_stack), work, self.device_stack.remembers(self.run), own)

    def _each_alone(self, task: Task) -> bool:
        """Whether clients of a task can work each for itself, with state that has its place here."""
        if task.place not in self._alone:
            schema = self.plan.schema(task.phase)
            own = bool(keys_with(schema, Policy.LOCAL)) and UNION in task.clients
            self._alone[task.place] = not (task.phase.lockstep or keys_with(schema, Policy.REPORTED) or own)
        return self._alone[task.place]

    def _work(self, task: Task) -> Work:
        """The shape of a task; its work is equal where all take equally many steps, on batches of one size."""
        plan = self.plan
        counts = {plan.num_steps(client, task.phase) for client in task.clients}
        steps = counts.pop()
        each = () if counts else zip(task.clients, task.firsts, strict=True)
        sizes = set[int]().union(*(plan.batches.stream(client).sizes(first, steps) for client, first in each))
        equal = len(sizes) == 1
        return Work(task.place, len(task.clients), steps if equal else None, sizes.pop() if equal else 0, task.keep)

    def forget(self, client: int) -> None:
        """A client's state in the store is newer than the one here."""
        self._here.discard(client)

    def fetch(self, store: Store, clients: Sequence[int]) -> None:
        """Bring the states of clients here that are newer in the store."""
        missing = [client for client in clients if client not in self._here and client != UNION]
        if missing and self.device_stack.holds_local:
            for client, state in store.get_many(missing).items():
                self.device_stack.load_client(self.run, client, state.tree)
        self._here.update(missing)

    def note(self, task: Task) -> None:
        """Remember what an exchange changed."""
        kept = keys_with(self.plan.schema(task.phase), Policy.LOCAL)
        if not task.keep or not (kept or task.phase.consumes_batches):
            return
        for client, first in zip(task.clients, task.firsts, strict=True):
            used = first + self.plan.num_steps(client, task.phase)
            self.away[client] = used if task.phase.consumes_batches else self.away.get(client, first)
            self._kept.setdefault(client, set()).update(kept)

    def bring_home(self, store: Store) -> None:
        """Put into the store what is newer here."""
        clients = list(self.away)
        if not clients:
            return
        before = store.get_many(clients)
        trees = self.device_stack.clients(self.run, clients) if any(self._kept.values()) else [{}] * len(clients)
        for client, tree in zip(clients, trees, strict=True):
            kept = {key: tree[key] for key in self._kept[client]}
            store.put(client, ClientState(self.away[client], {**before[client].tree, **kept}))
        self.away.clear()
        self._kept.clear()


def allocate_slot(plan: Plan) -> StackSlot | None:
    """The only seat of a resident, where a plan's rounds can stay on the device."""
    return StackSlot(DeviceStack([plan], reads_channels_last(plan)), 0) if can_stay(plan) else None


def reads_channels_last(plan: Plan) -> bool:
    """Whether the model's filters are best laid out as the stack kernels read them."""
    return any(isinstance(module, StackConv2d) for module in plan.prepared.model.modules())


def exchange_on_device(slots: Sequence[tuple[StackSlot, Task, Store]], work: Work) -> list[LateReports | None]:
    """One exchange of runs that share a resident, with tasks of this shape; None for those it cannot be a program for.

    As many runs at a time as memory allows: where all do not fit, halves are tried.
    """
    device_stack = slots[0][0].device_stack
    done: list[LateReports | None] = []
    while len(done) < len(slots):
        done += _exchange_at_once(device_stack, slots[len(done) : len(done) + device_stack.most_at_once], work)
    return done


def _exchange_at_once(
    device_stack: DeviceStack, slots: Sequence[tuple[StackSlot, Task, Store]], work: Work
) -> list[LateReports | None]:
    """The exchange of some seats; empty where they do not fit into memory together, which the resident remembers."""
    for slot, task, store in slots:
        slot.fetch(store, task.clients)
    try:
        if work.steps is None:
            ((slot, task, _),) = slots
            reports = device_stack.exchange_ragged(slot.run, task)
        else:
            reports = device_stack.exchange({slot.run: task for slot, task, _ in slots}, work.steps, work.size)
    except (RuntimeError, NotImplementedError, NotAProgram) as error:  # nothing lasting has changed yet
        if isinstance(error, FednormError):
            raise
        if isinstance(error, torch.OutOfMemoryError) and len(slots) > 1:
            device_stack.most_at_once = (len(slots) + 1) // 2
            return []
        device_stack.refused.add(slots[0][1].place)
        if not isinstance(error, NotAProgram):
            why = first_line(error)
            print(
                f"stacked engine: rounds cannot stay on the device ({why}); clients are stacked step by step",
                file=sys.stderr,
            )
        return [None] * len(slots)
    for slot, task, _ in slots:
        slot.note(task)
    return [reports[slot.run] for slot, _, _ in slots]


def local_bytes(plan: Plan) -> int:
    """The size of what all clients of a run keep."""
    return sum(entry.bytes for entry in entries_with(plan, Policy.LOCAL).values()) * len(plan.federation.clients)


def can_stay(plan: Plan) -> bool:
    """Whether a plan's rounds can be played on the device from end to end."""
    refuses = plan.config.engine.quorum is not None  # who may be refused must be looked at in every round
    return plan.device.type in DEVICES and not refuses and local_bytes(plan) <= MOST_LOCAL_BYTES
