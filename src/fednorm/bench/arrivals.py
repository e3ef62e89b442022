"""Clients that come one by one, beside the same clients in rounds: what keeping a clock costs.

The unit is a client's job, its local steps on what it was sent. In rounds all clients under way train in one stack;
on the clock each begins when another came back, so that what is under way began at many versions of the model.
"""

from __future__ import annotations

import time
from typing import Any, cast

import torch

from fednorm.bench.options import Options
from fednorm.bench.pools import random_images
from fednorm.bench.report import Progress, Section, measured
from fednorm.bench.timing import FOREVER, Play, Race, Rounds, synchronize
from fednorm.data.federation import Federation
from fednorm.engines.machine import threads
from fednorm.running.clock_run import ClockRun
from fednorm.running.config import RunConfig, updated
from fednorm.running.known import known_context
from fednorm.running.on_clock import Clock
from fednorm.running.plan import Plan, make_plan
from fednorm.running.run import Run
from fednorm.running.store import Store
from fednorm.strategies.revive.profile import server_step_seconds
from fednorm.strategies.revive.reviser import Revive

CLIENTS, IMAGES, BATCH, STEPS = 1000, 40, 20, 10
AT_A_TIME = {"cuda": 100, "cpu": 20}
WARM = {"cuda": 20, "cpu": 1}
"""How often as many jobs as are under way are played first; on a GPU until stacks of all sizes have come."""
ON_CPU, ON_GPU = "mlp_bn", "resnet18"
BUFFERED, WAITING, REVIVED, ONE_BY_ONE = "fedbuff(b=10)", "sync", "fedrevive", "afl-dw"
IN_ROUNDS = "rounds"


def section(options: Options) -> Section:
    settings = {"model": _model(options), "clients": CLIENTS, "at a time": _at_a_time(options), "batch": BATCH}
    settings |= {"local_steps": STEPS, "images a client": IMAGES, "times": "default", "precision": _precision(options)}
    return Section("async", {**settings, "optimizer": "SGD, momentum 0.9", "data": "random"})


def measure(options: Options, found: Section, progress: Progress) -> None:
    """Fill the section: jobs a second with each engine, then what a server spends that computes something itself."""
    on_gpu = options.device.type == "cuda"
    data = random_images(CLIENTS, IMAGES) if on_gpu else random_images(CLIENTS, IMAGES, shape=(1, 28, 28))
    for engine in ("stacked",) if on_gpu else ("sequential", "stacked"):
        workload = f"{_model(options)}, {_at_a_time(options)} of {CLIENTS} clients, {STEPS} steps, {engine}"
        progress.workload(f"async: {workload}")
        race = Race()
        plays = {
            IN_ROUNDS: _with_threads(in_rounds(_plan(options, data, engine, "fedavg")), options),
            WAITING: _with_threads(on_clock(_plan(options, data, engine, f"{WAITING}+fedavg")), options),
            BUFFERED: _with_threads(on_clock(_plan(options, data, engine, f"{BUFFERED}+fedavg")), options),
        }
        try:
            race.run(plays, options.effort, progress.now)
        finally:
            found.measurements += measured(workload, "ms a job", race.times, race.notes, 1e3)
            found.references[workload] = IN_ROUNDS
            _note_ratios(found, workload, engine)
    _measure_server(options, found, progress, random_images(CLIENTS, IMAGES))


def _measure_server(options: Options, found: Section, progress: Progress, data: Federation) -> None:
    """What a server spends on a version that it revises itself, beside the client's job that the version is made of."""
    model = _images_model(options)
    progress.workload(f"async: {REVIVED}, what the server computes itself, {model}")
    plans = [_plan(options, data, _engine(options), f"{name}+nonorm", model) for name in (REVIVED, ONE_BY_ONE)]
    progress.now("the server's own work")
    parts = server_seconds(plans[0], options.effort.turns)
    progress.now("the clients' work")
    play = _with_threads(on_clock(plans[1]), options)
    play(0.0)
    job = play(options.effort.seconds)
    found.key("revive.server_ms", model, {name: round(1e3 * seconds, 2) for name, seconds in parts.items()})
    found.key("revive.job_ms", model, round(1e3 * job, 2))
    found.key("revive.server_share", model, round(sum(parts.values()) / (sum(parts.values()) + job), 4))


def _note_ratios(found: Section, workload: str, engine: str) -> None:
    median = found.of(workload)
    for name, milliseconds in median.items():
        found.key(f"jobs_per_second.{name}", engine, round(1e3 / milliseconds, 1))
    for name in (WAITING, BUFFERED):
        if name in median and IN_ROUNDS in median:
            found.key(f"ratio.{name}/rounds", engine, round(median[IN_ROUNDS] / median[name], 4))


def in_rounds(plan: Plan) -> Play:
    """Seconds of a client's job in rounds."""
    play = Rounds(Run(plan, Store()), plan.device)
    return lambda seconds: play(seconds) / plan.cohort_size


def on_clock(plan: Plan) -> Play:
    """Seconds of a client's job on the clock; at least twice as many jobs as are under way, which train in stacks."""
    rows = ClockRun(plan, Store()).rounds()

    def play(seconds: float) -> float:
        least = plan.cohort_size * (2 if seconds else WARM.get(plan.device.type, 1))
        synchronize(plan.device)
        started, count = time.perf_counter(), 0
        while count < least or time.perf_counter() - started < seconds:
            count += next(rows)["clients"]
        synchronize(plan.device)
        return (time.perf_counter() - started) / count

    return play


def server_seconds(plan: Plan, repeats: int) -> dict[str, float]:
    """Seconds of each part of what the server computes itself for a version, once all of them are at work."""
    revise = cast(Revive, cast(Clock, plan.clock).strategy.revise)
    return server_step_seconds(revise.settings, known_context(plan), repeats)


def _plan(options: Options, data: Federation, engine: str, method: str, model: str | None = None) -> Plan:
    """A run of this workload, without scoring and checkpoints."""
    settings: dict[str, Any] = {"method": method, "model": model or _model(options), "rounds": FOREVER}
    settings |= {"train.local_steps": STEPS, "train.batch_size": BATCH, "train.lr": 0.01, "eval.every": FOREVER}
    settings |= {"engine.device": str(options.device), "engine.name": engine, "engine.checkpoint_every": FOREVER}
    settings |= {"engine.precision": _precision(options)}
    settings |= {"clock.concurrency" if "+" in method else "clients_per_round": _at_a_time(options)}
    return make_plan(updated(RunConfig(), settings), federation=data)


def _with_threads(play: Play, options: Options) -> Play:
    """On a CPU with one thread, as the engine `auto` has it."""

    def timed(seconds: float) -> float:
        with threads(1 if options.device.type == "cpu" else torch.get_num_threads()):
            return play(seconds)

    return timed


def _at_a_time(options: Options) -> int:
    return AT_A_TIME.get(options.device.type, AT_A_TIME["cpu"])


def _model(options: Options) -> str:
    return ON_GPU if options.device.type == "cuda" else ON_CPU


def _images_model(options: Options) -> str:
    """One with convolutions, which the strategies that make images are for."""
    return ON_GPU if options.device.type == "cuda" else "small_resnet"


def _engine(options: Options) -> str:
    return "stacked" if options.device.type == "cuda" else "sequential"


def _precision(options: Options) -> str:
    return options.precision or ("bf16" if options.device.type == "cuda" else "fp32")
