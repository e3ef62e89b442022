"""A run's slot in a stack whose rounds stay on the device, and what is newer there than in its store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fednorm.core.phases import PhaseId
from fednorm.core.state import Policy, Tree
from fednorm.engines.base import ClientStates, Order, Played, attempt
from fednorm.engines.stack.device_stack import (
    DEVICES,
    MOST_LOCAL_BYTES,
    DeviceStack,
    LateReports,
    Work,
    entries_with,
)
from fednorm.engines.stack.messages import Assignment
from fednorm.errors import FednormError
from fednorm.halves.exchange import Exchange
from fednorm.halves.mine import ClientState
from fednorm.halves.prepared_phase import PreparedPhase
from fednorm.halves.site import Sites


class BatchKey(NamedTuple):
    """What exchanges of several runs must have in common to be played as one."""

    work: Work
    remembered: frozenset[str]
    run: int | None
    """clients with unequal work do not share a stack with those of other runs"""


@dataclass(frozen=True)
class Usual:
    """What follows from a phase and who takes part in it, whatever batches they go on with."""

    clients: Sequence[int]
    shares: Mapping[int, float]
    counts: Sequence[int]
    """how many steps each takes"""
    work: Work | None
    """its shape, where no batch of any client is smaller than others"""


@dataclass
class StackSlot:
    """Run number `run` of a device stack: where its server's state lies, and the newest state of some clients."""

    stack: DeviceStack
    run: int
    away: dict[int, int] = field(default_factory=dict)
    """clients whose newest state is on the device, and how many batches of their lives they have used"""
    _here: set[int] = field(default_factory=set)
    """clients whose state on the device is their newest"""
    _kept: dict[int, set[str]] = field(default_factory=dict)
    _usual: dict[PhaseId, Usual] = field(default_factory=dict)

    @property
    def sites(self) -> Sites:
        return self.stack.runs[self.run]

    @property
    def tree(self) -> Tree:
        """The server's tree, as views that follow every exchange."""
        return self.stack.server(self.run)

    @tree.setter
    def tree(self, tree: Tree) -> None:
        self.stack.load_server(self.run, tree)

    @property
    def memory(self) -> Tree:
        return self.stack.memory(self.run)

    @memory.setter
    def memory(self, tree: Tree) -> None:
        self.stack.load_memory(self.run, tree)

    @property
    def facts(self) -> Mapping[str, Any]:
        """How often each shape of work came: whether it is played by a program, and so how it rounds, hangs on it."""
        return {"shapes": self.stack.shapes()}

    @facts.setter
    def facts(self, facts: Mapping[str, Any]) -> None:
        self.stack.load_shapes(facts.get("shapes", []))

    def assignment(self, order: Order) -> Assignment:
        """What an order means for the clients: the batches they go on with."""
        cohort, phase = order.exchange.cohort, order.exchange.phase
        used = {client: self.away[client] for client in cohort if client in self.away}
        if len(used) < len(cohort):
            rest = order.states.get_many([client for client in cohort if client not in used])
            used |= {client: state.steps for client, state in rest.items()}
        firsts = [self.sites.first_batch(phase, client, used[client]) for client in cohort]
        return Assignment(order.exchange, phase, firsts, self._usual_of(order.exchange).counts)

    def _usual_of(self, exchange: Exchange) -> Usual:
        """What is the same in every exchange of a phase with the same clients, worked out once for the last of them."""
        phase, cohort, shares = exchange.phase, exchange.cohort, exchange.shares
        usual = self._usual.get(phase.id)
        if usual is None or usual.clients != cohort or usual.shares != shares:
            sites = self.sites
            counts = [sites.num_steps(client, phase, shares.get(client, 1.0)) for client in cohort]
            streams = [sites.batches.stream(client) for client in cohort]
            sizes = {stream.batch_size for stream in streams if stream.all_full} if len(set(counts)) == 1 else set()
            alike = len(sizes) == 1 and all(stream.all_full for stream in streams)
            work = Work(phase.id, len(cohort), counts[0], sizes.pop()) if alike else None
            usual = self._usual[phase.id] = Usual(cohort, shares, counts, work)
        return usual

    def batch_key(self, task: Assignment) -> BatchKey | None:
        """What tasks must have in common to be one exchange; None for one that cannot be played on the device."""
        if task.phase.id in self.stack.refused:
            return None
        work = self.work(task)
        if not self.stack.pays(work):
            return None
        return BatchKey(work, self.stack.remembers(self.run), self.run if work.steps is None else None)

    def work(self, task: Assignment) -> Work:
        """The shape of a task; its work is equal where all take equally many steps, on batches of one size."""
        known = self._usual_of(task.exchange).work
        if known:
            return known
        counts = set(task.counts)
        steps = counts.pop()
        each = () if counts else zip(task.clients, task.firsts, strict=True)
        sizes = set[int]().union(*(self.sites.batches.stream(client).sizes(first, steps) for client, first in each))
        equal = len(sizes) == 1
        return Work(task.phase.id, len(task.clients), steps if equal else None, sizes.pop() if equal else 0)

    def forget(self, clients: Sequence[int]) -> None:
        """The states of clients in the store are newer than those here."""
        self._here.difference_update(clients)

    def fetch(self, states: ClientStates, clients: Sequence[int]) -> None:
        """Bring the states of clients here that are newer in the store."""
        missing = [client for client in clients if client not in self._here]
        if missing and self.stack.holds_local:
            self.stack.load_states(self.run, {c: state.tree for c, state in states.get_many(missing).items()})
        self._here.update(missing)

    def states(self, store: ClientStates, clients: Sequence[int]) -> dict[int, ClientState]:
        """The states of clients, where they lie on the device."""
        self.fetch(store, clients)
        stored = store.get_many([client for client in clients if client not in self.away])
        used = {**self.away, **{client: state.steps for client, state in stored.items()}}
        trees = self.stack.states(self.run, clients)
        return {client: ClientState(used[client], tree) for client, tree in zip(clients, trees, strict=True)}

    def keep(self, states: Mapping[int, ClientState], keys: Sequence[str]) -> None:
        """Take over what clients keep after an exchange that was merged on the host: these of their entries."""
        self.stack.load_states(self.run, {c: {key: s.tree[key] for key in keys} for c, s in states.items()})
        for client, state in states.items():
            self.away[client] = state.steps
            self._kept.setdefault(client, set()).update(keys)

    def note(self, task: Assignment) -> None:
        """Remember what an exchange changed."""
        kept, consumes = task.phase.kept, task.phase.phase.consumes_batches
        if not task.exchange.keeps or not (kept or consumes):
            return
        for client, first, count in zip(task.clients, task.firsts, task.counts, strict=True):
            self.away[client] = first + count if consumes else self.away.get(client, first)
        for client in task.clients if kept else ():
            self._kept.setdefault(client, set()).update(kept)

    def bring_home(self, states: ClientStates) -> None:
        """Put into the store what is newer here."""
        clients = list(self.away)
        if not clients:
            return
        before = states.get_many(clients)
        trees = self.stack.clients(self.run, clients) if any(self._kept.values()) else [{}] * len(clients)
        for client, tree in zip(clients, trees, strict=True):
            kept = {key: tree[key] for key in self._kept.get(client, ())}
            states.put(client, ClientState(self.away[client], {**before[client].tree, **kept}))
        self.away.clear()
        self._kept.clear()


@dataclass(frozen=True)
class _Turn:
    """An order with the slot it is for and the work it means."""

    number: int
    order: Order
    slot: StackSlot
    task: Assignment


def slot_of(order: Order) -> StackSlot | None:
    """Where the state of an order's run lies on the device; not for a server that collects what clients report."""
    held = order.server.held
    return held if isinstance(held, StackSlot) and not order.server.keeps_reported else None


def may_stay(order: Order, slot: StackSlot) -> bool:
    """Whether nobody but the device need look at an exchange before it is over."""
    alone = slot.stack.merges and order.server.quorum is None and not order.probing
    return alone and can_be_alone(order.exchange.phase)


def exchange_on_device(stack: DeviceStack, orders: Sequence[Order]) -> dict[int, Played | FednormError]:
    """Play on the device what can stay there, exchanges of a kind together; by the number of the order."""
    groups: dict[BatchKey, list[_Turn]] = {}
    for number, order in enumerate(orders):
        slot = slot_of(order)
        if slot is None or not may_stay(order, slot):
            continue
        task = slot.assignment(order)
        key = slot.batch_key(task)
        if key is not None:
            groups.setdefault(key, []).append(_Turn(number, order, slot, task))
    done: dict[int, Played | FednormError] = {}
    for key, turns in groups.items():
        reports = attempt(_exchange_in_parts, stack, turns, key.work)
        for index, turn in enumerate(turns):
            found = reports if isinstance(reports, FednormError) else reports[index]
            if found is not None:
                done[turn.number] = found if isinstance(found, FednormError) else Played(found)
    return done


def _exchange_in_parts(stack: DeviceStack, turns: Sequence[_Turn], work: Work) -> list[LateReports | None]:
    """One exchange of runs with work of this shape; None for those it cannot be a program for.

    As many runs at a time as memory allows: where all do not fit, halves are tried.
    """
    done: list[LateReports | None] = []
    while len(done) < len(turns):
        done += _exchange_at_once(stack, turns[len(done) : len(done) + stack.most_at_once], work)
    return done


def _exchange_at_once(stack: DeviceStack, turns: Sequence[_Turn], work: Work) -> list[LateReports | None]:
    """The exchange of some runs; empty where it is to be tried again: with fewer at once, which the stack remembers
    where they do not fit into memory together, or by the next way."""
    for turn in turns:
        turn.slot.fetch(turn.order.states, turn.task.clients)
    try:
        reports = stack.exchange({turn.slot.run: turn.task for turn in turns}, work)
    except FednormError:
        raise
    except Exception as error:  # of tracing, compiling, capturing or the model; nothing lasting has changed yet
        phase = turns[0].task.phase
        if isinstance(error, torch.OutOfMemoryError) and len(turns) > 1:
            stack.most_at_once = (len(turns) + 1) // 2
            return []
        return [] if stack.has_another_way(phase, error) else [None] * len(turns)
    stack.ways.works(turns[0].task.phase)
    for turn in turns:
        turn.slot.note(turn.task)
    return [reports[turn.slot.run] for turn in turns]


def local_bytes(sites: Sites) -> int:
    """The size of what all clients of a run keep."""
    own = entries_with(sites, Policy.LOCAL, Policy.REPORTED)
    return sum(entry.bytes for entry in own.values()) * len(sites.batches.pool.rows)


def can_stay(sites: Sites) -> bool:
    """Whether rounds of these clients can be played on their device from end to end; data to be read are not there."""
    fits = sites.device.type in DEVICES and local_bytes(sites) <= MOST_LOCAL_BYTES
    return fits and sites.batches.pool.live is None


def can_train_alone(phase: PreparedPhase) -> bool:
    """Whether clients can train each for itself in a program."""
    return len(phase.passes) == 1 and not phase.phase.lockstep


def can_be_alone(phase: PreparedPhase) -> bool:
    """Whether all of an exchange can be a program: nothing is left to do between clients' steps and the merge."""
    return can_train_alone(phase) and not any(each.rule.closings for each in phase.passes)
