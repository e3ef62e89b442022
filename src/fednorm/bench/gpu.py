"""A step of all clients on a GPU: the plain loop, our engines, and one centralized step on the same images."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from fednorm.bench.cases import Case
from fednorm.bench.options import PRECISIONS, Options
from fednorm.bench.plain_steps import FORMS, backends, centralized, client_loop
from fednorm.bench.pools import random_images
from fednorm.bench.report import Progress, Section, measured
from fednorm.bench.timing import FOREVER, Play, Race, Rounds, repeated
from fednorm.data.federation import Federation
from fednorm.errors import first_line
from fednorm.running.config import RunConfig, updated
from fednorm.running.plan import make_plan
from fednorm.running.run import Run
from fednorm.running.store import Store

BATCH, IMAGES = 20, 1000
STEPS_OF_A_RUN = 100_000
"""Local steps of the runs that are timed, as studies have them: how long a run is decides what of it is compiled."""
EVERY_STEP = "stacked bf16, merged after every step"


def section(options: Options) -> Section:
    settings = {"model": options.model, "batch": BATCH, "images a client": IMAGES, "augment": "crop(2)+flip"}
    settings |= {"optimizer": "SGD, momentum 0.9, weight decay 1e-4", "local_steps": options.local_steps}
    settings |= {"central": "bf16 autocast, channels-last", "data": "random"}
    return Section("gpu", settings)


def measure(options: Options, found: Section, progress: Progress) -> None:
    """Fill a section, one number of clients after the other."""
    for clients in options.clients:
        workload = f"{options.model}, batch {BATCH}, {clients} clients"
        progress.workload(f"gpu: {workload}")
        _measure(workload, clients, options, found, progress)


def _measure(workload: str, clients: int, options: Options, found: Section, progress: Progress) -> None:
    race = Race()
    plays: dict[str, Play] = {}
    try:
        plays = variants(clients, options, race.notes, progress)
        race.run(plays, options.effort, progress.now)
    finally:
        note_clocks(plays, race, progress)
        found.measurements += measured(workload, "ms a step", race.times, race.notes, 1e3)
        found.references[workload] = "central compiled" if options.device.type == "cuda" else "central eager"
        _note_ratios(found, workload, str(clients))
        end_runs(plays)


def _note_ratios(found: Section, workload: str, clients: str) -> None:
    median = found.of(workload)

    def ratio(one: str, other: str) -> float | None:
        return round(median[one] / median[other], 4) if one in median and other in median else None

    speed_ups = {each: ratio(f"plain {each}", f"stacked {each}") for each in PRECISIONS}
    if any(speed_ups.values()):
        found.key("ratio.plain/stacked", clients, {each: value for each, value in speed_ups.items() if value})
    for key, variant in (("stacked_bf16", "stacked bf16"), ("stacked_bf16_every_step", EVERY_STEP)):
        value = ratio(variant, "central compiled")
        if value:
            found.key(f"ratio.{key}/central_compiled", clients, value)


def variants(clients: int, options: Options, notes: dict[str, str], progress: Progress) -> dict[str, Play]:
    """What is timed; on a CPU only what makes sense there."""
    model, device, steps = options.model, options.device, options.local_steps
    on_gpu = device.type == "cuda"
    precisions, forms = (options.precisions, FORMS) if on_gpu else (("fp32",), FORMS[:1])
    slow = "tf32" if on_gpu else "fp32"
    data = random_images(clients, IMAGES)
    found: dict[str, Play] = {}
    for precision in precisions:
        found[f"plain {precision}"] = repeated(client_loop(Case(model), clients, BATCH, precision, device), device)
    found[f"sequential {slow}"] = engine(model, data, "sequential", slow, 1, device)
    for precision in precisions:
        found[f"stacked {precision}"] = engine(model, data, "stacked", precision, steps, device)
    if on_gpu:
        found[EVERY_STEP] = engine(model, data, "stacked", "bf16", 1, device)
    for form in forms:
        started = time.perf_counter()
        progress.now(f"central {form}: making it ready")
        try:
            found[f"central {form}"] = repeated(centralized(Case(model), clients * BATCH, form, device), device)
        except RuntimeError as error:  # a machine without a C compiler, say
            progress.line(f"central {form} left out: {first_line(error)}")
        if form == "compiled":
            notes["central compiled"] = f"compiled in {time.perf_counter() - started:.1f} s"
    return found


class Steps:
    """Seconds of a step of all clients, inside the rounds of a run that neither scores nor writes checkpoints."""

    def __init__(self, config: RunConfig, data: Federation) -> None:
        self._config, self._data = config, data
        self.rounds: Rounds | None = None

    def __call__(self, seconds: float) -> float:
        with backends(self._config.engine.precision, search=None):  # cuDNN as the run itself sets it
            if self.rounds is None:
                plan = make_plan(self._config, federation=self._data)
                self.rounds = Rounds(Run(plan, Store()), plan.device)
            return self.rounds(seconds) / (self._config.train.local_steps or 1)


def engine(model: str, data: Federation, name: str, precision: str, local_steps: int, device: torch.device) -> Steps:
    """The steps of a model's clients in an engine."""
    return Steps(config_of(model, name, precision, device, local_steps=local_steps), data)


def note_clocks(plays: Mapping[str, Play], race: Race, progress: Progress) -> None:
    """Say of which variants two ways of timing tell different things."""
    for name, play in plays.items():
        doubt = play.rounds.disagree() if isinstance(play, Steps) and play.rounds else ""
        if doubt:
            race.notes[name] = doubt
            progress.line(f"{name}: {doubt}")


def end_runs(plays: Mapping[str, Play]) -> None:
    """End the runs behind some variants."""
    for play in plays.values():
        if isinstance(play, Steps) and play.rounds:
            play.rounds.close()


def config_of(model: str, name: str, precision: str, device: torch.device, **work: int) -> RunConfig:
    """A run of this workload in an engine, without scoring and checkpoints; `work` is of each client in a round."""
    settings: dict[str, Any] = {"model": model, **{f"train.{key}": n for key, n in work.items()}}
    settings |= {"rounds": max(1, STEPS_OF_A_RUN // work.get("local_steps", 1))}
    settings |= {"train.batch_size": BATCH, "train.lr": 0.001, "train.momentum": 0.9, "train.weight_decay": 1e-4}
    settings |= {"train.augment": "crop(2)+flip", "eval.every": FOREVER, "engine.checkpoint_every": FOREVER}
    settings |= {"engine.name": name, "engine.precision": precision, "engine.device": str(device)}
    return updated(RunConfig(), settings)
