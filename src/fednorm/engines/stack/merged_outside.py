"""Exchanges whose clients train by programs on the device, while the host has a say before they are merged.

A quorum must know who is refused before the merge, a merge over ranks joins clients of other processes, and probes look
at the clients. With a quorum the host reads what clients report: where all can be used, which is nearly always, the
merge is a program too. Else what clients end with is handed out as rows of the stack, and goes the way of every engine;
what they keep goes back into the slot.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from fednorm.core.report import Report
from fednorm.core.state import Tree
from fednorm.engines.base import ClientStates, Order, Played, play_plainly
from fednorm.engines.stack.messages import Assignment
from fednorm.engines.stack.phase_program import PhaseProgram
from fednorm.engines.stack.slot import StackSlot, can_be_alone, can_train_alone, may_stay
from fednorm.engines.tolerance import Train
from fednorm.errors import FednormError, first_line
from fednorm.halves.exchange import Exchange
from fednorm.halves.mine import ClientState
from fednorm.halves.prepared_phase import PreparedPhase
from fednorm.halves.training import Job, Outcome, outcome


def play_from_slot(order: Order, slot: StackSlot, otherwise: Train) -> Played:
    """An exchange that begins and ends in a slot; clients that no program can train are trained `otherwise`."""
    phase, states = order.exchange.phase, _States(slot, order.states)
    before: list[PhaseProgram | None] = []
    if slot.stack.merges and not order.probing and can_be_alone(phase):
        task = slot.assignment(order)
        slot.fetch(order.states, task.clients)
        # What may stay was tried before: it cannot be a program, or comes too seldom to pay.
        before = [None if may_stay(order, slot) else _trained(slot, task, probing=False)]
        if before[0] and (reports := _merged_there(order, slot, task, before[0])):
            return Played(reports)
    played = play_plainly(replace(order, states=states), _by_programs(order.exchange, slot, otherwise, before))
    slot.keep(states.new, phase.kept)
    return played


def _merged_there(order: Order, slot: StackSlot, task: Assignment, program: PhaseProgram) -> list[Report] | None:
    """The reports of clients that can all be used, once they are merged; None for those that the host must look at."""
    stack, phase = slot.stack, task.phase
    if phase.id in stack.unjudged:
        return None
    try:
        reports = stack.judge(slot.run, program, task)
        if reports.flaws(order.server.norm_factor):
            return None
        stack.merge(slot.run, program)
    except FednormError:
        raise
    except Exception as error:  # of tracing, compiling or capturing; clients are trained, and nothing is merged yet
        stack.unjudged.add(phase.id)
        print(f"stacked engine: '{phase.phase.name}' is merged on the host ({first_line(error)})", file=sys.stderr)
        return None
    order.server.admit(task.clients, {})
    slot.note(task)
    return list(reports)


@dataclass(frozen=True)
class _States:
    """Clients' states where they lie in a slot, and the new ones that an exchange leaves for it."""

    slot: StackSlot
    store: ClientStates
    new: dict[int, ClientState] = field(default_factory=dict[int, ClientState])

    def get_many(self, clients: Sequence[int]) -> dict[int, ClientState]:
        return self.slot.states(self.store, clients)

    def put(self, client: int, state: ClientState) -> None:
        self.new[client] = state


def _by_programs(exchange: Exchange, slot: StackSlot, otherwise: Train, before: list[PhaseProgram | None]) -> Train:
    """Training by the programs of a slot's stack, where these can be had; `before` is what came of it for all."""

    def train(phase: PreparedPhase, jobs: Sequence[Job], probing: bool = False) -> Iterator[Outcome]:
        firsts, counts = [job.first_batch for job in jobs], [job.num_steps for job in jobs]
        task = Assignment(replace(exchange, cohort=[job.client for job in jobs]), phase, firsts, counts)
        program = before.pop() if before else _trained(slot, task, probing)
        if program is None:
            return otherwise(phase, jobs, probing)
        return iter(_outcomes(program, slot, jobs, probing))

    return train


def _trained(slot: StackSlot, task: Assignment, probing: bool) -> PhaseProgram | None:
    """The program that has trained the clients of a task; None where there is none, or it would not pay."""
    stack, phase = slot.stack, task.phase
    if not can_train_alone(phase) or (probing and phase.id in stack.unseen):
        return None
    work = slot.work(task)
    if not stack.pays(work):
        return None
    while phase.id not in stack.refused:
        try:
            program = stack.train(slot.run, task, work, slot.sites.probes if probing else ())
        except FednormError:
            raise
        except Exception as error:  # of tracing, compiling, capturing, the model or a probe
            if probing:
                stack.unseen.add(phase.id)
                what = f"'{phase.phase.name}' is stacked step by step where probes look"
                print(f"stacked engine: {what} ({first_line(error)})", file=sys.stderr)
                return None
            if not stack.has_another_way(phase, error):
                return None
        else:
            stack.ways.works(phase)
            return program
    return None


def _outcomes(program: PhaseProgram, slot: StackSlot, jobs: Sequence[Job], probing: bool) -> list[Outcome]:
    """What clients bring: rows of the program's stack, to be merged and kept before it is played again."""
    losses = program.losses.T.tolist()
    ends, seen = _rows(program.ends, len(jobs)), _rows(program.probed, len(jobs))
    return [
        outcome(slot.sites, program.phase, job, end, own[: job.num_steps], probed if probing else None)
        for job, end, own, probed in zip(jobs, ends, losses, seen, strict=True)
    ]


def _rows(stack: Tree, count: int) -> list[Tree]:
    """The trees of the clients in a stack."""
    each = zip(*(value.unbind() for value in stack.values()), strict=True)
    return [dict(zip(stack, own, strict=True)) for own in each] if stack else [{} for _ in range(count)]
