"""Whole runs against the clock: 64,000 rounds of one step each, and the benchmark of another simulator.

A shortened run is played to its end too; what the full one would take is then computed and says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fednorm.bench.options import Options
from fednorm.bench.plain_steps import backends
from fednorm.bench.pools import cifar10
from fednorm.bench.report import Measured, Progress, Section
from fednorm.bench.timing import FOREVER, steady_seconds, synchronize
from fednorm.data.federation import Federation
from fednorm.running.config import RunConfig, updated
from fednorm.running.plan import make_plan
from fednorm.running.records import score_of
from fednorm.running.run import Run
from fednorm.running.store import Store
from fednorm.running.threads import threads_of


@dataclass(frozen=True)
class LongRun:
    """A workload that is timed from its first line to its last score."""

    name: str
    title: str
    rounds: int
    on_cpu: int
    """rounds that are played where there is no GPU"""
    precision: str
    settings: dict[str, Any]
    data: Callable[[str | Path | None], Federation]


EVERY_STEP = LongRun(
    name="rounds",
    title="128 epochs of CIFAR-10, ResNet20, 5 clients, a round a step",
    rounds=64_000,
    on_cpu=20,
    precision="bf16",
    settings={
        "model": "resnet20",
        "train.local_steps": 1,
        "train.batch_size": 20,
        "train.lr": 0.2,
        "train.momentum": 0.0,
        "train.weight_decay": 1e-4,
        "train.schedule": "step",
        "train.augment": "crop(2)+flip",
        "eval.every": FOREVER,
    },
    data=lambda folder: cifar10(5, folder),
)

PFL = LongRun(
    name="pfl",
    title="pfl-research's CIFAR-10, 50 of 1,000 clients, 5 steps",
    rounds=1500,
    on_cpu=10,
    precision="fp32",
    settings={
        "model": "simple_cnn",
        "clients_per_round": 50,
        "train.local_epochs": 1,
        "train.batch_size": 10,
        "train.lr": 0.1,
        "train.momentum": 0.0,
        "train.weight_decay": 0.0,
        "train.weights": "uniform",
        "eval.every": 10,
        "eval.chunk": 5000,
    },
    data=lambda folder: cifar10(1000, folder),
)


def section(workload: LongRun, options: Options) -> Section:
    precision = options.precision or (workload.precision if options.device.type == "cuda" else "fp32")
    return Section(workload.name, {"rounds": workload.rounds, "precision": precision, **workload.settings})


def measure(workload: LongRun, options: Options, found: Section, progress: Progress) -> None:
    """Play the run and fill its section."""
    device = options.device
    played = options.rounds or (workload.rounds if device.type == "cuda" else workload.on_cpu)
    precision = found.settings["precision"]
    settings = {**workload.settings, "rounds": played, "engine.device": str(device), "engine.precision": precision}
    config = updated(RunConfig(), {**settings, "engine.checkpoint_every": FOREVER})
    federation = workload.data(options.data_dir)
    found.settings |= {"rounds played": played, "data": federation.name}
    progress.workload(f"{workload.name}: {workload.title}; {played} rounds, {precision}, {federation.name}")
    moments: list[float] = []
    row: Mapping[str, Any] = {}
    started = time.perf_counter()
    plan = make_plan(config, federation=federation)
    try:
        with threads_of(plan), backends(precision, search=None):
            run = Run(plan, Store())
            found.settings["engine"] = run.engine_name
            for row in run.rounds():
                moments.append(time.perf_counter())
                if len(moments) % max(1, played // 200) == 0:
                    progress.now(f"{workload.name}: round {row['round']} of {played}")
            synchronize(device)
    finally:
        if moments:
            total = time.perf_counter() - started
            found.measurements += _measurements(workload, started, moments, total, precision)
    found.settings["accuracy"] = score_of(row.get("eval", {}), "pooled", "accuracy")


def _measurements(
    workload: LongRun, started: float, moments: list[float], total: float, precision: str
) -> list[Measured]:
    """The time as it was, and as it would be for all rounds if fewer were played."""
    played = len(moments)
    what = f"{workload.title}, {precision}"
    first = Measured(what, "until the first rows came", "s", (moments[0] - started,))
    if played == workload.rounds:
        return [Measured(what, f"all {played:,} rounds", "s", (total,)), first]
    pace = _seconds_a_round(workload, started, moments)
    note = f"computed from {played:,} rounds: not played"
    whole = total + (workload.rounds - played) * pace
    return [
        Measured(what, f"{played:,} rounds", "s", (total,)),
        Measured(what, f"all {workload.rounds:,} rounds, extrapolated", "s", (whole,), note=note),
        first,
    ]


def _seconds_a_round(workload: LongRun, started: float, moments: list[float]) -> float:
    """Of the rounds played; the last one's score counts only where scoring is part of the rounds."""
    scored = workload.settings["eval.every"] < FOREVER
    usual = moments if scored or len(moments) < 3 else moments[:-1]
    mean = (usual[-1] - usual[0]) / max(1, len(usual) - 1)
    return mean if scored else steady_seconds(started, usual) or mean
