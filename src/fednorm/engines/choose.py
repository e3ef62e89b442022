"""Which engine plays a run: the one that was named, or for `auto` the fastest on this machine.

A choice must not change what a run means. The sequential engine and the workers run the same code, to the bit on one
thread, which is what `auto` uses on a CPU, so the faster of the two is taken. The stacked engine agrees up to rounding
only; it is taken where it always is: on a GPU.
"""

from __future__ import annotations

import contextlib
import copy
import io
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from fednorm.batches import UNION
from fednorm.engines.base import Engine, Job, start_state
from fednorm.engines.sequential import SequentialEngine
from fednorm.engines.stacked import StackedEngine
from fednorm.engines.workers import WorkersEngine, count_processes
from fednorm.errors import unknown
from fednorm.plan import Plan

MIN_STEPS = 50
"""Runs of fewer steps are played as they come; two steps to look would be a good part of them."""
MIN_SECONDS = 20.0
"""A run as short does not repay the start of processes and a measurement."""
TIMED_STEPS = 3


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
    # One thread, or a process of a larger undertaking: the other cores are not ours to take.
    alone = plan.config.engine.threads == 1 or multiprocessing.parent_process() is not None
    if plan.device.type != "cpu" or alone or count_processes(plan) == 1 or plan.method.data == "union":
        return "sequential", sequential
    steps = _steps_per_round(plan)
    total = steps * plan.config.rounds
    trial = _with_own_model(plan)
    reference = SequentialEngine(trial)
    # The first step also pays for what torch sets up once: an upper bound, and enough for a short run.
    if total < MIN_STEPS or any(total * _seconds(trial, reference, 1, 1) < MIN_SECONDS for _ in range(2)):
        return "sequential", sequential
    workers = WorkersEngine(plan)
    clients = min(2 * workers.processes, plan.cohort_size)
    candidates: dict[str, Engine] = {"sequential": reference, "workers": workers}
    with contextlib.redirect_stderr(io.StringIO()):  # an engine that must fall back says so when it is chosen
        times = {name: _seconds_per_round(trial, engine, clients, steps) for name, engine in candidates.items()}
    if workers.refused:
        del times["workers"]
    name = min(times, key=lambda each: times[each])
    print(_line(name, times, workers.processes), file=sys.stderr)
    if name == "workers":
        return name, workers
    workers.close()
    return name, ENGINES[name](plan)


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


def _seconds_per_round(plan: Plan, engine: Engine, clients: int, steps: int) -> float:
    _seconds(plan, engine, clients, 1)  # starts processes, and whatever torch sets up once
    return steps * min(_seconds(plan, engine, clients, TIMED_STEPS) for _ in range(2))
