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

from fednorm.core.phases import PhaseId
from fednorm.core.report import Report
from fednorm.core.state import Tree
from fednorm.core.user_code import is_users, user_error
from fednorm.engines.base import Order, PlainEngine, Played, attempt, play_plainly
from fednorm.engines.machine import keep_memory, refuse_other_than_cpu, usable_cores
from fednorm.engines.sequential import SequentialEngine
from fednorm.engines.tolerance import Failure, is_the_runs, one_by_one
from fednorm.engines.worker_messages import (
    CannotSend,
    WorkerMessage,
    from_message,
    shared,
    slot_bytes,
    slot_views,
    survives,
    to_message,
)
from fednorm.errors import FednormError, UserCodeError
from fednorm.halves.messages import Update
from fednorm.halves.prepared_phase import PreparedPhase
from fednorm.halves.site import Sites
from fednorm.halves.training import Job, Outcome, Trainer

SLOTS = 2
"""Clients that a worker may have at a time: the one it trains, and the next."""


class WorkersEngine(PlainEngine):
    """Clients train in processes that start with the first phase and end with the run.

    Phases in lock-step, phases that cannot be sent and cohorts of one are trained here, by the same code.
    """

    def __init__(self, sites: Sites, processes: int) -> None:
        refuse_other_than_cpu(sites.device)
        self.sites = sites
        self.processes = processes
        self._here = SequentialEngine(sites)
        self._crew: Crew | None = None

    def train(self, phase: PreparedPhase, jobs: Sequence[Job], probing: bool = False) -> Iterator[Outcome]:
        alone = phase.phase.lockstep or len(jobs) == 1 or self.fell_back
        crew = None if alone else self._crew or self._start()
        if crew is None or not crew.knows(phase):
            yield from self._here.train(phase, jobs, probing)
            return
        for done in self._with_crew(crew, phase, jobs, probing, tolerant=False):
            if isinstance(done, Outcome):
                yield done

    def train_tolerantly(self, phase: PreparedPhase, jobs: Sequence[Job], probing: bool) -> Iterator[Outcome | Failure]:
        """The same, where a client whose training fails, or whose process ends, is named and lost alone.

        Not even a single one is trained in this process, which it might end.
        """
        crew = None if phase.phase.lockstep or self.fell_back else self._crew or self._start()
        if crew is None or not crew.knows(phase):
            return one_by_one(self._here.train, self.sites.prepared.name)(phase, jobs, probing)
        return self._with_crew(crew, phase, jobs, probing, tolerant=True)

    def exchange(self, orders: Sequence[Order]) -> list[Played | FednormError]:
        return [attempt(play_plainly, order, self.train, self.train_tolerantly) for order in orders]

    def _with_crew(
        self,
        crew: Crew,
        phase: PreparedPhase,
        jobs: Sequence[Job],
        probing: bool,
        *,
        tolerant: bool,
    ) -> Iterator[Outcome | Failure]:
        try:
            yield from crew.train(phase, jobs, probing, tolerant)
        except BaseException:  # also an interrupt, or a caller that listens no more: workers are in the middle of it
            self.close()
            raise

    def _start(self) -> Crew | None:
        try:
            self._crew = Crew(self.sites, self.processes)
        except CannotSend as refusal:
            print(f"workers engine: {refusal}; using sequential", file=sys.stderr)
            self.fell_back = str(refusal)
        return self._crew

    def close(self) -> None:
        """End the processes; a later phase would start new ones."""
        if self._crew:
            self._crew.close()
            self._crew = None


def count_processes(asked: int | None, cohort: int) -> int:
    """As many processes as asked for, or one per core; never more than clients in a round."""
    return max(1, min(asked or usable_cores(), cohort))


@dataclass
class Worker:
    """A process as its parent sees it."""

    process: BaseProcess
    pipe: connection.Connection
    slots: tuple[Tensor, ...]
    clients: deque[tuple[int, int]] = field(default_factory=deque)
    """The clients it has, first the one it works on, each with the number of its slot."""
    views: dict[tuple[int, PhaseId], Tree] = field(default_factory=dict)

    @property
    def free_slot(self) -> int:
        taken = {slot for _, slot in self.clients}
        return next(slot for slot in range(len(self.slots)) if slot not in taken)


class Crew:
    """Processes that train clients of the same sites."""

    def __init__(self, sites: Sites, count: int) -> None:
        self._message = message = to_message(sites)
        self._model = sites.prepared.name
        self._phases = {id: sites.phase(id) for id in message.phases}
        self._workers: list[Worker] = []
        size = max(slot_bytes(phase.schema) for phase in self._phases.values())
        # Runs when the crew is closed, is no longer used or the program ends, and before multiprocessing waits.
        self._end = util.Finalize(self, _end_all, args=(self._workers,), exitpriority=10)
        try:
            for _ in range(count):
                slots = tuple(shared(torch.zeros(size, dtype=torch.uint8)) for _ in range(SLOTS))
                self._workers.append(Worker(*_start(message, slots), slots))
            for worker in self._workers:
                self._receive(worker, "while it started")
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid or 0 for worker in self._workers]

    def knows(self, phase: PreparedPhase) -> bool:
        """Whether the processes have a phase."""
        return phase.id in self._phases

    def close(self) -> None:
        self._end()

    def train(
        self,
        phase: PreparedPhase,
        jobs: Sequence[Job],
        probing: bool,
        tolerant: bool = False,
    ) -> Iterator[Outcome | Failure]:
        """Each worker takes the next client when it is done with one; the longest work goes first, to end together.

        Where that is tolerated, a client that fails is told of, and a process that it took with it is replaced.
        """
        waiting = deque(sorted(jobs, key=lambda job: -job.num_steps))
        by_client = {job.client: job for job in jobs}

        def give(worker: Worker) -> None:
            job = waiting.popleft()
            try:
                self._send(worker, phase, job, probing)
            except WorkerLost:
                if not tolerant:
                    raise
                worker.clients.pop()
                waiting.appendleft(job)
                if not worker.clients:  # one that has some is missed when it should tell of them
                    self._replace(worker)

        def supply(worker: Worker) -> None:
            # The last clients are for whoever is done first, so they are not given out ahead.
            while waiting and (
                not worker.clients or (len(worker.clients) < SLOTS and len(waiting) > len(self._workers))
            ):
                left = len(waiting)
                give(worker)
                if len(waiting) == left and worker.clients:
                    return

        for worker in self._workers[: len(jobs)]:
            give(worker)
        for worker in self._workers:
            supply(worker)
        while busy := {worker.pipe: worker for worker in self._workers if worker.clients}:
            ready = connection.wait(list(busy))
            for worker in [worker for pipe, worker in busy.items() if pipe in ready]:
                client, slot = worker.clients[0]
                try:
                    told = self._receive(worker, f"with client {client}")
                    done = self._collect(worker, slot, phase, told)
                    worker.clients.popleft()
                except WorkerLost as lost:
                    if not tolerant:
                        raise
                    done = Failure(client, f"its process {lost.how}")
                    waiting.extendleft(by_client[other] for other, _ in list(worker.clients)[1:])
                    self._replace(worker)
                except Exception as error:
                    if not tolerant or is_the_runs(error):
                        raise
                    done = Failure.of(client, error, self._model)
                    worker.clients.popleft()
                supply(worker)
                yield done

    def _replace(self, worker: Worker) -> None:
        """Put a new process in the place of one that ended."""
        worker.pipe.close()
        worker.process.join()
        worker.process.close()
        worker.clients.clear()
        worker.process, worker.pipe = _start(self._message, worker.slots)
        self._receive(worker, "while it started")

    def _send(self, worker: Worker, phase: PreparedPhase, job: Job, probing: bool) -> None:
        slot = worker.free_slot
        for key, view in self._slot(worker, slot, phase).items():
            view.copy_(job.start[key])
        worker.clients.append((job.client, slot))
        try:
            worker.pipe.send((slot, phase.id, job.client, job.first_batch, job.steps, dict(job.numbers), probing))
        except OSError:
            raise _lost(worker, f"before client {job.client}") from None

    def _receive(self, worker: Worker, when: str) -> Any:
        try:
            told = worker.pipe.recv()
        except (EOFError, OSError):
            raise _lost(worker, when) from None
        if isinstance(told, UserCodeError):
            raise told from vars(told).pop("raised", None)
        if isinstance(told, BaseException):
            raise told
        return told

    def _collect(
        self, worker: Worker, slot: int, phase: PreparedPhase, told: tuple[Report, dict[str, float]]
    ) -> Outcome:
        report, probed = told
        parts = phase.split(self._slot(worker, slot, phase))  # views of what the next client will overwrite
        sent, told_of, kept = ({key: view.clone() for key, view in part.items()} for part in parts)
        return Outcome(Update(report, sent, told_of, probed), kept)

    def _slot(self, worker: Worker, slot: int, phase: PreparedPhase) -> Tree:
        if (slot, phase.id) not in worker.views:
            worker.views[slot, phase.id] = slot_views(worker.slots[slot], phase.schema)
        return worker.views[slot, phase.id]


class WorkerLost(FednormError):
    """A process ended that should have trained; `how` says what of."""

    def __init__(self, how: str, when: str) -> None:
        self.how = how
        super().__init__(
            f"a worker process {how} {when}; if memory is short, give fewer engine.workers, then resume the run"
        )


def _lost(worker: Worker, when: str) -> WorkerLost:
    worker.process.join(60)  # its pipe is closed, so it is as good as gone
    code = worker.process.exitcode or 0
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return WorkerLost(how, when)


def _start(message: WorkerMessage, slots: tuple[Tensor, ...]) -> tuple[BaseProcess, connection.Connection]:
    # A fresh interpreter: a fork of a process that has used torch's threads may hang.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, message, slots), name="fednorm worker", daemon=True)
    resource_tracker.ensure_running()  # which would undo the block below if the first process started it
    # The block is inherited: signals to a terminal's whole group are for the parent, which ends its workers itself.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        with _main_left_alone():
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
    return process, ours


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


def _serve(pipe: connection.Connection, message: WorkerMessage, slots: tuple[Tensor, ...]) -> None:
    """The life of a worker process."""
    _die_with_parent()
    keep_memory()
    torch.set_num_threads(1)
    try:
        sites, phases = from_message(message)
    except Exception as error:  # an import that fails here, say
        known = isinstance(error, CannotSend)
        pipe.send(error if known else CannotSend(f"the plan cannot be rebuilt in another process ({error})"))
        return
    pipe.send("ready")
    trainer = Trainer(sites)
    views = [{id: slot_views(slot, phase.schema) for id, phase in phases.items()} for slot in slots]
    while True:
        try:
            slot, id, client, first_batch, steps, numbers, probing = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            job = Job(client, views[slot][id], first_batch, steps, numbers)
            (done,) = trainer.train(phases[id], [job], probing)
            _write(views[slot][id], done)
            pipe.send((done.update.report, dict(done.update.probed)))
        except Exception as error:
            pipe.send(_portable(error, client, sites.prepared.name))


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


def _portable(error: Exception, client: int, model: str) -> Exception:
    """The error itself where it survives the way to the parent, or its text; one of the user's code says so."""
    told = traceback.format_exc()
    if not isinstance(error, FednormError) and is_users(error):
        cause, error = error, user_error(error, model)
        vars(error)["raised"] = cause if survives(cause) else None
    if survives(error):
        error.add_note(f"in a worker process, with client {client}:\n{told}")
        return error
    return FednormError(f"client {client}: {type(error).__name__}: {' '.join(str(error).split())}")
