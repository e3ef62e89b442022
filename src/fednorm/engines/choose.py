"""Which engine plays a run: the one that was named, or for `auto` the fastest of those that give the same bits.

A choice must not change what comes out. The sequential engine and the workers run the same code, to the bit on one
thread, which is what `auto` uses on a CPU, so the faster of the two is taken, in case of doubt workers. The stacked
engine agrees up to rounding only: it is what `auto` means on a GPU, whatever a clock says there, and on a CPU it is
offered in a line where it is faster by a clear margin, which many clients of a tiny model make possible. A run that
goes on keeps the engine it was begun with.
"""

from __future__ import annotations

import contextlib
import io
import math
import multiprocessing
import sys
import time
from collections.abc import Mapping, Sequence

from fednorm.core.phases import PhaseId, Purpose
from fednorm.core.user_code import UserCode
from fednorm.data.batches import UNION
from fednorm.engines.base import Engine, Settings
from fednorm.engines.machine import expect_large_tensors
from fednorm.engines.sequential import SequentialEngine
from fednorm.engines.stack.stacked import StackedEngine
from fednorm.engines.workers import WorkersEngine, count_processes
from fednorm.errors import unknown
from fednorm.halves.prepared_phase import PreparedPhase
from fednorm.halves.site import Sites
from fednorm.halves.training import Job

MIN_STEPS = 50
"""Runs of fewer steps are played as they come; two steps to look would be a good part of them."""
MIN_SECONDS = 20.0
"""A run as short does not repay the start of processes and a measurement."""
TIMED_STEPS = 3
LOOK_SECONDS = 0.5
"""How long to look at an engine, at least; two looks are taken in any case."""
MARGIN = 1.25
"""How many times faster the stack must be on a CPU to be offered, since its roundings are others."""
DOUBT = 1.25
"""How many times slower workers may look and still be taken: cores that others use just now hide what they can do."""
STACK_STEPS = 200
"""Runs in which a client takes fewer steps do not repay the seven that timing the stack takes of every client."""
STACK_BYTES = 2**30
"""A stack holds every client's weights, gradients and activations at once; larger ones are not tried on a CPU."""


ENGINES = ("auto", "sequential", "stacked", "workers")


def make_engine(
    runs: Sequence[Sites], settings: Settings, *, cohort: int, remembered: str | None = None, stays: bool = True
) -> tuple[str, Engine]:
    """The engine of a run, or of several that are the same program, and its name.

    A run that goes on keeps the engine it was begun with, which it `remembered`. `cohort` is how many clients a round
    draws, `stays` whether rounds may stay on the device.
    """
    name = settings.name
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    if runs[0].device.type == "cpu":
        expect_large_tensors()
    if name == "auto":
        if remembered not in ENGINES or remembered == "auto":
            return _choose(runs, settings, cohort, stays)
        name = remembered
    return name, _made(name, runs, settings, cohort, stays)


def _made(name: str, runs: Sequence[Sites], settings: Settings, cohort: int, stays: bool) -> Engine:
    if name == "stacked":
        return StackedEngine(runs, precision=settings.precision, stays=stays)
    (sites,) = runs
    if name == "workers":
        return WorkersEngine(sites, count_processes(settings.workers, cohort))
    return SequentialEngine(sites)


def _choose(runs: Sequence[Sites], settings: Settings, cohort: int, stays: bool) -> tuple[str, Engine]:
    sites = runs[0]
    if sites.device.type == "cuda":
        return "stacked", _made("stacked", runs, settings, cohort, stays)
    sequential = SequentialEngine(sites)
    # A process of a larger undertaking is not alone on its cores: nothing it measures would last.
    if sites.device.type != "cpu" or sites.method.data == "union" or multiprocessing.parent_process() is not None:
        return "sequential", sequential
    if settings.threads and settings.threads > 1:  # sums of several threads are not those of workers with one each
        return "sequential", sequential
    steps = steps_per_round(sites, sites.batches.pool.clients[:cohort])
    total = steps * sites.work.rounds
    trial = sites.with_own_model()
    reference = SequentialEngine(trial)
    # The first step also pays for what torch sets up once: an upper bound, and enough for a short run.
    if total < MIN_STEPS or any(total * seconds_of_step(trial, reference, 1, 1) < MIN_SECONDS for _ in range(2)):
        return "sequential", sequential
    candidates: dict[str, Engine] = {"sequential": reference}
    processes = count_processes(settings.workers, cohort)
    # One thread was given, or there is one core: the others are not ours to take.
    workers = WorkersEngine(sites, processes) if settings.threads != 1 and processes > 1 else None
    if workers:
        candidates["workers"] = workers
    if cohort > 1 and total >= STACK_STEPS * cohort and _stack_bytes(sites, cohort) <= STACK_BYTES:
        candidates["stacked"] = StackedEngine([sites], precision=settings.precision, stays=False)
    if len(candidates) == 1:
        return "sequential", sequential
    times = _seconds_of_rounds(trial, candidates, steps, cohort, processes)
    name = pick(times)
    print(_line(name, times, processes), file=sys.stderr)
    if workers and name != "workers":
        workers.close()
    return name, workers if workers and name == "workers" else sequential


def _seconds_of_rounds(
    sites: Sites, candidates: dict[str, Engine], steps: int, cohort: int, processes: int
) -> dict[str, float]:
    """The seconds of a round with each engine that can train these clients."""
    few = min(2 * processes, cohort)
    clients = {name: cohort if name == "stacked" else few for name in candidates}
    with contextlib.redirect_stderr(io.StringIO()):  # an engine that must fall back says so when it is chosen
        for name, engine in candidates.items():  # starts processes, and whatever torch sets up once
            seconds_of_step(sites, engine, clients[name], 1)
        able = {name: engine for name, engine in candidates.items() if not engine.fell_back}
        times = dict.fromkeys(able, math.inf)
        started, turns = time.perf_counter(), 0
        # In turn, and the best of several: other programs may disturb one look, but hardly all.
        while turns < 2 or time.perf_counter() - started < LOOK_SECONDS * len(able):
            for name, engine in able.items():
                times[name] = min(times[name], steps * seconds_of_step(sites, engine, clients[name], TIMED_STEPS))
            turns += 1
    return times


def pick(times: Mapping[str, float]) -> str:
    """The fastest engine of those that give the same bits, workers in case of doubt.

    >>> pick({"sequential": 1.0, "workers": 0.6, "stacked": 0.1}), pick({"sequential": 1.0, "stacked": 0.1})
    ('workers', 'sequential')
    >>> pick({"sequential": 1.0, "workers": 1.1}), pick({"sequential": 1.0, "workers": 1.5})
    ('workers', 'sequential')
    """
    exact = {name: seconds for name, seconds in times.items() if name != "stacked"}
    return min(exact, key=lambda name: exact[name] / (DOUBT if name == "workers" else 1.0))


def _stack_bytes(sites: Sites, cohort: int) -> int:
    """A guess at what a stack needs: some copies of each client's weights, and a batch with 100 maps as large as it."""
    example = sites.batches.pool.x.shape[1:].numel() * sites.batches.dtype.itemsize
    weights = sum(entry.bytes for entry in sites.prepared.entries)
    return cohort * (4 * weights + 100 * example * sites.batches.batch_size)


def _line(name: str, times: Mapping[str, float], processes: int) -> str:
    """What was chosen; and where the stack is faster by the margin, the flag that takes it."""
    how = f"{name} ({processes} processes)" if name == "workers" else name
    exact = [f"{other} {seconds:.2g} s" for other, seconds in times.items() if other not in (name, "stacked")]
    line = ", ".join([f"engine: {how}: {times[name]:.2g} s a round", *exact])
    stacked = times.get("stacked", math.inf)
    if stacked * MARGIN >= min(times[name] for name in times if name != "stacked"):
        return line
    return f"{line}; --engine stacked takes {stacked:.2g} s and agrees up to rounding"


def steps_per_round(sites: Sites, clients: Sequence[int]) -> int:
    """Steps that some clients take in a round of the stage with the most."""
    training = [phase for phase in sites.phases if phase.id.purpose is Purpose.TRAIN]
    return max(
        sum(sites.num_steps(client, phase) for client in clients for phase in training if phase.id.stage == stage)
        for stage in range(len(sites.method.stages))
    )


def _jobs_to_time(sites: Sites, clients: int, steps: int) -> tuple[PreparedPhase, list[Job]]:
    """The last phase of a round, and work in it for some clients that take at most this many steps of each pass."""
    phase = sites.phase(PhaseId(Purpose.TRAIN, 0, len(sites.method.stages[0]) - 1))
    chosen = (UNION,) if sites.method.sees_union(phase.phase) else sites.batches.pool.clients[:clients]
    start = phase.start(sites.initial(), {}, sites.device)
    counts = {client: tuple(min(steps, own) for own in sites.steps(client, phase)) for client in chosen}
    numbers = sites.numbers(phase.id, 1)
    return phase, [Job(client, start, 0, counts[client], numbers) for client in chosen]


def seconds_of_step(sites: Sites, engine: Engine, clients: int, steps: int) -> float:
    """Seconds of a step, in a phase of some clients that take some steps."""
    phase, jobs = _jobs_to_time(sites, clients, steps)
    started = time.perf_counter()
    with UserCode(sites.prepared.name):
        for _ in engine.train(phase, jobs):
            pass
    return (time.perf_counter() - started) / sum(job.num_steps for job in jobs)
