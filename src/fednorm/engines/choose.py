"""Which engine plays a run: the one that was named, or for `auto` the fastest on this machine.

A choice must not change what a run means. The sequential engine and the workers run the same code, to the bit on one
thread, which is what `auto` uses on a CPU, so the faster of the two is taken, in case of doubt workers. The stacked
engine agrees up to rounding only: it is taken on a GPU, where it always wins, and on a CPU where it is faster by a
clear margin, which many clients of a tiny model make possible. A run that goes on keeps the engine it was begun with.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from fednorm.data.batches import UNION
from fednorm.engines.base import Engine, Job, start_state
from fednorm.engines.sequential import SequentialEngine
from fednorm.engines.stack.stacked import StackedEngine
from fednorm.engines.workers import WorkersEngine, count_processes
from fednorm.errors import unknown
from fednorm.running.plan import Plan

MIN_STEPS = 50
"""Runs of fewer steps are played as they come; two steps to look would be a good part of them."""
MIN_SECONDS = 20.0
"""A run as short does not repay the start of processes and a measurement."""
TIMED_STEPS = 3
LOOK_SECONDS = 0.5
"""How long to look at an engine, at least; two looks are taken in any case."""
MARGIN = 1.25
"""How many times faster the stack must be on a CPU to be worth other roundings."""
DOUBT = 1.25
"""How many times slower workers may look and still be taken: cores that others use just now hide what they can do."""
STACK_STEPS = 200
"""Runs in which a client takes fewer steps do not repay the seven that timing the stack takes of every client."""
STACK_BYTES = 2**30
"""A stack holds every client's weights, gradients and activations at once; larger ones are not tried on a CPU."""


def auto(plan: Plan) -> Engine:
    """The engine that `auto` stands for."""
    return make_engine(plan)[1]


ENGINES: dict[str, Callable[[Plan], Engine]] = {
    "auto": auto,
    "sequential": SequentialEngine,
    "stacked": StackedEngine,
    "workers": WorkersEngine,
}


def make_engine(plan: Plan, remembered: str | None = None) -> tuple[str, Engine]:
    """The engine of a run and its name; a run that goes on keeps the one it was begun with."""
    name = plan.config.engine.name
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    if name == "auto":
        if remembered not in ENGINES or remembered == "auto":
            return _choose(plan)
        name = remembered
    return name, ENGINES[name](plan)


def close_engine(engine: Engine) -> None:
    """Give back what an engine holds beside memory: processes, which most have none of."""
    if isinstance(engine, WorkersEngine):
        engine.close()


def _choose(plan: Plan) -> tuple[str, Engine]:
    if plan.device.type == "cuda":
        return "stacked", StackedEngine(plan)
    sequential = SequentialEngine(plan)
    # A process of a larger undertaking is not alone on its cores: nothing it measures would last.
    if plan.device.type != "cpu" or plan.method.data == "union" or multiprocessing.parent_process() is not None:
        return "sequential", sequential
    steps = _steps_per_round(plan)
    total = steps * plan.config.rounds
    trial = _with_own_model(plan)
    reference = SequentialEngine(trial)
    # The first step also pays for what torch sets up once: an upper bound, and enough for a short run.
    if total < MIN_STEPS or any(total * _seconds(trial, reference, 1, 1) < MIN_SECONDS for _ in range(2)):
        return "sequential", sequential
    candidates: dict[str, Engine] = {"sequential": reference}
    # One thread was given, or there is one core: the others are not ours to take.
    if plan.config.engine.threads != 1 and count_processes(plan) > 1:
        candidates["workers"] = WorkersEngine(plan)
    if plan.cohort_size > 1 and total >= STACK_STEPS * plan.cohort_size and _stack_bytes(plan) <= STACK_BYTES:
        candidates["stacked"] = StackedEngine(_with_own_model(plan))
    if len(candidates) == 1:
        return "sequential", sequential
    name, times = _fastest(trial, candidates, steps)
    workers = candidates.get("workers")
    print(_line(name, times, count_processes(plan)), file=sys.stderr)
    if workers is not None and name != "workers":
        close_engine(workers)
    return name, workers if workers is not None and name == "workers" else ENGINES[name](plan)


def _fastest(plan: Plan, candidates: dict[str, Engine], steps: int) -> tuple[str, dict[str, float]]:
    """The engine to take, and the seconds of a round with each that can train this plan."""
    few = min(2 * count_processes(plan), plan.cohort_size)
    clients = {name: plan.cohort_size if name == "stacked" else few for name in candidates}
    with contextlib.redirect_stderr(io.StringIO()):  # an engine that must fall back says so when it is chosen
        for name, engine in candidates.items():  # starts processes, and whatever torch sets up once
            _seconds(plan, engine, clients[name], 1)
        able = {name: engine for name, engine in candidates.items() if not _fell_back(engine)}
        times = dict.fromkeys(able, math.inf)
        started, turns = time.perf_counter(), 0
        # In turn, and the best of several: other programs may disturb one look, but hardly all.
        while turns < 2 or time.perf_counter() - started < LOOK_SECONDS * len(able):
            for name, engine in able.items():
                times[name] = min(times[name], steps * _seconds(plan, engine, clients[name], TIMED_STEPS))
            turns += 1
    return pick(times), times


def pick(times: dict[str, float]) -> str:
    """The fastest engine; the stack only where it is faster by the margin, workers in case of doubt.

    >>> pick({"sequential": 1.0, "workers": 0.6, "stacked": 0.5}), pick({"sequential": 1.0, "stacked": 0.5})
    ('workers', 'stacked')
    >>> pick({"sequential": 1.0, "workers": 1.1, "stacked": 0.9}), pick({"sequential": 1.0, "workers": 1.5})
    ('workers', 'sequential')
    """
    exact = {name: seconds for name, seconds in times.items() if name != "stacked"}
    if times.get("stacked", math.inf) * MARGIN < min(exact.values()):
        return "stacked"
    return min(exact, key=lambda name: exact[name] / (DOUBT if name == "workers" else 1.0))


def _fell_back(engine: Engine) -> bool:
    """Whether an engine had to leave the work to the sequential one."""
    if isinstance(engine, StackedEngine):
        return engine.fell_back
    return isinstance(engine, WorkersEngine) and engine.refused


def _stack_bytes(plan: Plan) -> int:
    """A guess at what a stack needs: some copies of each client's weights, and a batch with 100 maps as large as it."""
    example = plan.federation.x[:1].numel() * plan.batches.dtype.itemsize
    weights = sum(entry.bytes for entry in plan.prepared.entries)
    return plan.cohort_size * (4 * weights + 100 * example * plan.batches.batch_size)


def _line(name: str, times: dict[str, float], processes: int) -> str:
    how = f"{name} ({processes} processes)" if name == "workers" else name
    others = ", ".join(f"{other} {seconds:.2g} s" for other, seconds in times.items() if other != name)
    return f"engine: {how}: {times[name]:.2g} s a round, {others}"


def _steps_per_round(plan: Plan) -> int:
    clients = plan.federation.training_clients[: plan.cohort_size]
    return max(
        sum(plan.num_steps(client, phase) for client in clients for phase in stage) for stage in plan.method.stages
    )


def _with_own_model(plan: Plan) -> Plan:
    """The plan with a model to try on: layers may count their calls."""
    return replace(plan, prepared=replace(plan.prepared, model=copy.deepcopy(plan.prepared.model)))


def _jobs(plan: Plan, clients: int, steps: int) -> Sequence[Job]:
    phase = plan.method.stages[0][-1]
    chosen = (UNION,) if phase.union else plan.federation.training_clients[:clients]
    schema, server = plan.schema(phase), plan.initial()
    return [
        Job(client, start_state(plan, schema, server, {}), 0, min(steps, plan.num_steps(client, phase)))
        for client in chosen
    ]


def _seconds(plan: Plan, engine: Engine, clients: int, steps: int) -> float:
    """Seconds of a step, in a phase of some clients that take some steps."""
    jobs = _jobs(plan, clients, steps)
    started = time.perf_counter()
    for _ in engine.train(plan.method.stages[0][-1], 1, jobs, False):
        pass
    return (time.perf_counter() - started) / sum(job.num_steps for job in jobs)
