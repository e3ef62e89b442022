"""Clients in parallel on the CPU: worker processes of one thread each run the sequential engine's own code.

The data set lies in shared memory, and so do two slots per worker, through which a client's state goes there and comes
back: while a worker trains one client, the next one already waits for it. Pipes carry a few numbers per client.
Everybody waits without looking around: no polling, no tensor is pickled.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import traceback
import types
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import connection, resource_tracker, util
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor

from fednorm.core.method import Phase
from fednorm.core.report import Report
from fednorm.core.state import Policy, Tree
from fednorm.engines.base import Job, Outcome
from fednorm.engines.sequential import SequentialEngine
from fednorm.engines.worker_messages import CannotSend, Parcel, pack, shared, slot_bytes, slot_views, survives, unpack
from fednorm.errors import ConfigError, FednormError
from fednorm.halves.merging import Update, keys_with
from fednorm.running.plan import Plan

SLOTS = 2
"""Clients that a worker may have at a time: the one it trains, and the next."""


class WorkersEngine:
    """Clients train in processes that start with the first phase and end with the run.

    Phases in lock-step, phases that cannot be sent and cohorts of one are trained here, by the same code.
    """

    def __init__(self, plan: Plan) -> None:
        if plan.device.type != "cpu":
            raise ConfigError(
                f"engine 'workers' trains on the CPU, but the device is {plan.device}; "
                "give --device cpu, or --engine stacked"
            )
        self.plan = plan
        self.processes = count_processes(plan)
        self._here = SequentialEngine(plan)
        self._crew: Crew | None = None
        self.refused = False

    def train(self, phase: Phase, round: int, jobs: Sequence[Job], probing: bool) -> Iterator[Outcome]:
        crew = None if phase.lockstep or len(jobs) == 1 or self.refused else self._crew or self._start()
        place = crew.place(phase) if crew else None
        if crew is None or place is None:
            yield from self._here.train(phase, round, jobs, probing)
            return
        try:
            yield from crew.train(place, round, jobs, probing)
        except BaseException:  # also an interrupt, or a caller that listens no more: workers are in the middle of it
            self.close()
            raise

    def _start(self) -> Crew | None:
        try:
            self._crew = Crew(self.plan, self.processes)
        except CannotSend as refusal:
            print(f"workers engine: {refusal}; using sequential", file=sys.stderr)
            self.refused = True
        return self._crew

    def close(self) -> None:
        """End the processes; a later phase would start new ones."""
        if self._crew:
            self._crew.close()
            self._crew = None


def usable_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_processes(plan: Plan) -> int:
    """As many processes as configured, or one per core; never more than clients in a round."""
    return max(1, min(plan.config.engine.workers or usable_cores(), plan.cohort_size))


@dataclass
class Worker:
    """A process as its parent sees it."""

    process: BaseProcess
    pipe: connection.Connection
    slots: tuple[Tensor, ...]
    clients: deque[tuple[int, int]] = field(default_factory=deque)
    """The clients it has, first the one it works on, each with the number of its slot."""
    views: dict[tuple[int, int], Tree] = field(default_factory=dict)

    @property
    def free_slot(self) -> int:
        taken = {slot for _, slot in self.clients}
        return next(slot for slot in range(len(self.slots)) if slot not in taken)


class Crew:
    """Processes that share a plan."""

    def __init__(self, plan: Plan, count: int) -> None:
        self.plan = plan
        parcel = pack(plan)
        self._schemas = {place: plan.schema(plan.phases[place]) for place in parcel.phases}
        self._workers: list[Worker] = []
        size = max(map(slot_bytes, self._schemas.values()))
        # Runs when the crew is closed, is no longer used or the program ends, and before multiprocessing waits.
        self._end = util.Finalize(self, _end_all, args=(self._workers,), exitpriority=10)
        try:
            for _ in range(count):
                slots = tuple(shared(torch.zeros(size, dtype=torch.uint8)) for _ in range(SLOTS))
                self._workers.append(_start(parcel, slots))
            for worker in self._workers:
                self._receive(worker, "while it started")
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid or 0 for worker in self._workers]

    def place(self, phase: Phase) -> int | None:
        """Where a phase stands in the plan; None if the processes do not have it."""
        places = (place for place, each in enumerate(self.plan.phases) if each is phase and place in self._schemas)
        return next(places, None)

    def close(self) -> None:
        self._end()

    def train(self, place: int, round: int, jobs: Sequence[Job], probing: bool) -> Iterator[Outcome]:
        """Each worker takes the next client when it is done with one; the longest work goes first, to end together."""
        waiting = deque(sorted(jobs, key=lambda job: -job.num_steps))

        def supply(worker: Worker) -> None:
            # The last clients are for whoever is done first, so they are not given out ahead.
            while waiting and (
                not worker.clients or (len(worker.clients) < SLOTS and len(waiting) > len(self._workers))
            ):
                self._send(worker, place, round, waiting.popleft(), probing)

        for worker in self._workers[: len(jobs)]:
            self._send(worker, place, round, waiting.popleft(), probing)
        for worker in self._workers:
            supply(worker)
        while busy := {worker.pipe: worker for worker in self._workers if worker.clients}:
            ready = connection.wait(list(busy))
            for worker in [worker for pipe, worker in busy.items() if pipe in ready]:
                client, slot = worker.clients[0]
                told = self._receive(worker, f"in round {round} with client {client}")
                done = self._collect(worker, slot, place, told)
                worker.clients.popleft()
                supply(worker)
                yield done

    def _send(self, worker: Worker, place: int, round: int, job: Job, probing: bool) -> None:
        slot = worker.free_slot
        for key, view in self._slot(worker, slot, place).items():
            view.copy_(job.start[key])
        worker.clients.append((job.client, slot))
        try:
            worker.pipe.send((slot, place, round, job.client, job.first_batch, job.num_steps, probing))
        except OSError:
            raise _lost(worker, f"before round {round}, client {job.client}") from None

    def _receive(self, worker: Worker, when: str) -> Any:
        try:
            told = worker.pipe.recv()
        except (EOFError, OSError):
            raise _lost(worker, when) from None
        if isinstance(told, BaseException):
            raise told
        return told

    def _collect(self, worker: Worker, slot: int, place: int, told: tuple[Report, dict[str, float]]) -> Outcome:
        report, seen = told
        views = self._slot(worker, slot, place)

        def copies(policy: Policy) -> Tree:
            return {key: views[key].clone() for key in keys_with(self._schemas[place], policy)}

        update = Update(report, shared=copies(Policy.SHARED), reported=copies(Policy.REPORTED))
        return Outcome(update, kept=copies(Policy.LOCAL), seen=seen)

    def _slot(self, worker: Worker, slot: int, place: int) -> Tree:
        if (slot, place) not in worker.views:
            worker.views[slot, place] = slot_views(worker.slots[slot], self._schemas[place])
        return worker.views[slot, place]


def _lost(worker: Worker, when: str) -> FednormError:
    worker.process.join(5)
    code = worker.process.exitcode or 0
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return FednormError(
        f"a worker process {how} {when}; if memory is short, give fewer engine.workers, then resume the run"
    )


def _start(parcel: Parcel, slots: tuple[Tensor, ...]) -> Worker:
    # A fresh interpreter: a fork of a process that has used torch's threads may hang.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, parcel, slots), name="fednorm worker", daemon=True)
    resource_tracker.ensure_running()  # which would undo the block below if the first process started it
    # The block is inherited: signals to a terminal's whole group are for the parent, which ends its workers itself.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        with _main_left_alone():
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
    return Worker(process, ours, slots)


@contextmanager
def _main_left_alone() -> Iterator[None]:
    """Keep multiprocessing from running the user's script again in each worker, which scripts rarely expect."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def _end_all(workers: list[Worker]) -> None:
    for worker in workers:
        worker.process.kill()  # it holds nothing that would need an orderly end
    for worker in workers:
        worker.process.join()
        worker.process.close()
        worker.pipe.close()
    workers.clear()


def _serve(pipe: connection.Connection, parcel: Parcel, slots: tuple[Tensor, ...]) -> None:
    """The life of a worker process."""
    _die_with_parent()
    torch.set_num_threads(1)
    try:
        plan, phases = unpack(parcel)
    except Exception as error:  # an import that fails here, say
        known = isinstance(error, CannotSend)
        pipe.send(error if known else CannotSend(f"the plan cannot be rebuilt in another process ({error})"))
        return
    pipe.send("ready")
    engine = SequentialEngine(plan)
    schemas = {place: plan.schema(phase) for place, phase in phases.items()}
    views = [{place: slot_views(slot, schema) for place, schema in schemas.items()} for slot in slots]
    while True:
        try:
            slot, place, round, client, first_batch, num_steps, probing = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            job = Job(client, views[slot][place], first_batch, num_steps)
            (done,) = engine.train(phases[place], round, [job], probing)
            _write(views[slot][place], done)
            pipe.send((done.update.report, dict(done.seen)))
        except Exception as error:
            pipe.send(_portable(error, client))


def _die_with_parent() -> None:
    """A worker whose parent was killed ends at once, in the middle of a client."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _write(views: Tree, done: Outcome) -> None:
    for key, value in {**done.update.shared, **done.update.reported, **done.kept}.items():
        if value.dtype != views[key].dtype or value.shape != views[key].shape:
            raise FednormError(
                f"client {done.update.client} changed '{key}' from {views[key].dtype} {tuple(views[key].shape)} "
                f"to {value.dtype} {tuple(value.shape)}; a layer must keep the type and shape of its state"
            )
        views[key].copy_(value)


def _portable(error: Exception, client: int) -> Exception:
    """The error itself where it survives the way to the parent, or its text."""
    if survives(error):
        error.add_note(f"in a worker process, with client {client}:\n{traceback.format_exc()}")
        return error
    return FednormError(f"client {client}: {type(error).__name__}: {' '.join(str(error).split())}")
