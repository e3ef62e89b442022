"""A run's place among those whose rounds stay on the device, and what is newer there than in its store."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fednorm.batches import UNION
from fednorm.engines.exchange import NotAProgram
from fednorm.engines.kernels.layers import StackConv2d
from fednorm.engines.resident import DEVICES, MOST_LOCAL_BYTES, LateReports, Resident, Task, Work, entries_with
from fednorm.errors import FednormError, first_line
from fednorm.plan import Plan
from fednorm.server import keys_with
from fednorm.state import Policy, Tree
from fednorm.store import ClientState, Store


class Alike(NamedTuple):
    """What tasks of one exchange have in common."""

    resident: int
    work: Work
    remembered: frozenset[str]
    run: int | None
    """clients with unequal work do not share a stack with those of other runs"""


@dataclass
class Seat:
    """Run number `run` of a resident."""

    resident: Resident
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
        return self.resident.plans[self.run]

    @property
    def server(self) -> Tree:
        return self.resident.server(self.run)

    @server.setter
    def server(self, tree: Tree) -> None:
        self.resident.load_server(self.run, tree)

    @property
    def memory(self) -> Tree:
        return self.resident.memory(self.run)

    @memory.setter
    def memory(self, tree: Tree) -> None:
        self.resident.load_memory(self.run, tree)

    def alike(self, task: Task) -> Alike | None:
        """What tasks must have in common to be one exchange; None for one that cannot be played on the device."""
        if task.place in self.resident.refused or not self._each_alone(task):
            return None
        work = self._work(task)
        if not self.resident.pays(work):
            return None
        own = self.run if work.steps is None else None
        return Alike(id(self.resident), work, self.resident.remembers(self.run), own)

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
        if missing and self.resident.holds_local:
            for client, state in store.get_many(missing).items():
                self.resident.load_client(self.run, client, state.tree)
        self._here.update(missing)

    def note(self, task: Task) -> None:
        """Remember what an exchange changed."""
        kept = keys_with(self.plan.schema(task.phase), Policy.LOCAL)
        if not task.keep or not (kept or task.phase.advances):
            return
        for client, first in zip(task.clients, task.firsts, strict=True):
            used = first + self.plan.num_steps(client, task.phase)
            self.away[client] = used if task.phase.advances else self.away.get(client, first)
            self._kept.setdefault(client, set()).update(kept)

    def bring_home(self, store: Store) -> None:
        """Put into the store what is newer here."""
        clients = list(self.away)
        if not clients:
            return
        before = store.get_many(clients)
        trees = self.resident.clients(self.run, clients) if any(self._kept.values()) else [{}] * len(clients)
        for client, tree in zip(clients, trees, strict=True):
            kept = {key: tree[key] for key in self._kept[client]}
            store.put(client, ClientState(self.away[client], {**before[client].tree, **kept}))
        self.away.clear()
        self._kept.clear()


def take_seat(plan: Plan) -> Seat | None:
    """The only seat of a resident, where a plan's rounds can stay on the device."""
    return Seat(Resident([plan], channels_last(plan)), 0) if can_stay(plan) else None


def channels_last(plan: Plan) -> bool:
    """Whether the model's filters are best laid out as the stack kernels read them."""
    return any(isinstance(module, StackConv2d) for module in plan.prepared.model.modules())


def exchange_on_device(seats: Sequence[tuple[Seat, Task, Store]], work: Work) -> list[LateReports | None]:
    """One exchange of runs that share a resident, with tasks of this shape; None for those it cannot be a program for.

    As many runs at a time as memory allows: where all do not fit, halves are tried.
    """
    resident = seats[0][0].resident
    done: list[LateReports | None] = []
    while len(done) < len(seats):
        done += _exchange_at_once(resident, seats[len(done) : len(done) + resident.most_at_once], work)
    return done


def _exchange_at_once(
    resident: Resident, seats: Sequence[tuple[Seat, Task, Store]], work: Work
) -> list[LateReports | None]:
    """The exchange of some seats; empty where they do not fit into memory together, which the resident remembers."""
    for seat, task, store in seats:
        seat.fetch(store, task.clients)
    try:
        if work.steps is None:
            ((seat, task, _),) = seats
            reports = resident.exchange_ragged(seat.run, task)
        else:
            reports = resident.exchange({seat.run: task for seat, task, _ in seats}, work.steps, work.size)
    except (RuntimeError, NotImplementedError, NotAProgram) as error:  # nothing lasting has changed yet
        if isinstance(error, FednormError):
            raise
        if isinstance(error, torch.OutOfMemoryError) and len(seats) > 1:
            resident.most_at_once = (len(seats) + 1) // 2
            return []
        resident.refused.add(seats[0][1].place)
        if not isinstance(error, NotAProgram):
            why = first_line(error)
            print(
                f"stacked engine: rounds cannot stay on the device ({why}); clients are stacked step by step",
                file=sys.stderr,
            )
        return [None] * len(seats)
    for seat, task, _ in seats:
        seat.note(task)
    return [reports[seat.run] for seat, _, _ in seats]


def local_bytes(plan: Plan) -> int:
    """The size of what all clients of a run keep."""
    return sum(entry.bytes for entry in entries_with(plan, Policy.LOCAL).values()) * len(plan.federation.clients)


def can_stay(plan: Plan) -> bool:
    """Whether a plan's rounds can be played on the device from end to end."""
    refuses = plan.config.engine.quorum is not None  # who may be refused must be looked at in every round
    return plan.device.type in DEVICES and not refuses and local_bytes(plan) <= MOST_LOCAL_BYTES
