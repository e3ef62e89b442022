"""A step of all clients of several models: beside a centralized step, and beside what it cannot be faster than.

Its `reference` is the larger of the centralized step on the same images and of the traffic of the clients' own weights,
which a centralized step does not have; its `floor` is what memory, arithmetic and launches take at least.
"""

from __future__ import annotations

import gc

import torch

from fednorm.bench.cases import Case, labels_of
from fednorm.bench.floors import BYTES_A_SECOND, LAUNCH_SECONDS, PRODUCTS_A_SECOND, Count, count
from fednorm.bench.gpu import BATCH, Steps, config_of, end_runs, note_clocks
from fednorm.bench.options import Options
from fednorm.bench.plain_steps import Form, centralized
from fednorm.bench.pools import random_images
from fednorm.bench.profiles import profile_of
from fednorm.bench.report import Measured, Progress, Section, measured, number
from fednorm.bench.timing import Play, Race, repeated
from fednorm.errors import FednormError, first_line
from fednorm.running.config import updated

IMAGES, LARGE_IMAGES = 1000, 200
"""Images of a client, of CIFAR's size and of larger ones."""
REFERENCE, FLOOR = "reference", "floor"


def section(options: Options) -> Section:
    settings = {"models": [case.name for case in options.cases], "batch": BATCH, "local_steps": options.local_steps}
    settings |= {"images a client": IMAGES, "larger images a client": LARGE_IMAGES, "augment": "crop(2)+flip"}
    settings |= {"optimizer": "SGD, momentum 0.9, weight decay 1e-4", "central": "bf16 autocast, channels-last"}
    settings |= {"bytes a second": BYTES_A_SECOND, "products a second": PRODUCTS_A_SECOND}
    return Section("models", settings | {"seconds a launch": LAUNCH_SECONDS, "data": "random"})


def measure(options: Options, found: Section, progress: Progress) -> None:
    """Fill a section, one model and number of clients after the other; one that fails is named and left out."""
    for case in options.cases:
        counted = count(case)
        found.key("parameters", case.name, counted.parameters)
        for clients in case.clients:
            progress.workload(f"models: {_workload(case, clients)}")
            try:
                _measure(case, clients, counted, options, found, progress)
            except (RuntimeError, FednormError) as error:  # memory that is too small, say
                progress.line(f"{case.name} with {clients} clients left out: {first_line(error)}")
            gc.collect()
            if options.device.type == "cuda":
                torch.cuda.empty_cache()


def _workload(case: Case, clients: int) -> str:
    return f"{case.name}, batch {BATCH}, {clients} clients"


def _measure(case: Case, clients: int, counted: Count, options: Options, found: Section, progress: Progress) -> None:
    on_gpu = options.device.type == "cuda"
    precision, form = ("bf16", "compiled") if on_gpu else ("fp32", "eager")
    ours, central, workload = f"stacked {precision}", f"central {form}", _workload(case, clients)
    steps = stacked(case, clients, precision, options)
    race = Race()
    plays: dict[str, Play] = {ours: steps, central: _central(case, clients, form, options)}
    if case.parts:
        plays[f"{ours}, {case.model}"] = stacked(Case(case.model, pixels=case.pixels), clients, precision, options)
    try:
        try:
            race.run(plays, options.effort, progress.now)
        finally:
            note_clocks(plays, race, progress)
            found.measurements += measured(workload, "ms a step", race.times, race.notes, 1e3)
        profile = profile_of(steps.rounds, options.local_steps) if on_gpu and steps.rounds else None
        if profile:
            found.details[workload] = profile.to_json()
    finally:
        end_runs(plays)
    _add_bounds(found, case, clients, counted, profile.launches if profile else 0.0, ours, central)
    if steps.rounds and steps.rounds.first_row is not None:
        _key(found, "seconds_to_first_row", case, clients, round(steps.rounds.first_row, 3))


def stacked(case: Case, clients: int, precision: str, options: Options) -> Steps:
    """The steps of a case's clients in a stack."""
    images = IMAGES if case.pixels <= 32 else LARGE_IMAGES
    data = random_images(clients, images, shape=(3, case.pixels, case.pixels), labels=labels_of(case))
    config = config_of(case.model, "stacked", precision, options.device, local_steps=options.local_steps)
    return Steps(updated(config, {"method": case.method}), data)


def _central(case: Case, clients: int, form: Form, options: Options) -> Play:
    return repeated(centralized(case, clients * BATCH, form, options.device), options.device)


def _add_bounds(
    found: Section, case: Case, clients: int, counted: Count, launches: float, ours: str, central: str
) -> None:
    """The reference and the floor of a workload, and where our step is between them."""
    workload = _workload(case, clients)
    median = found.of(workload)
    traffic, step = 1e3 * counted.traffic(clients), median[central]
    memory, arithmetic = (1e3 * part(clients, BATCH) for part in (counted.memory, counted.arithmetic))
    floor = 1e3 * counted.floor(clients, BATCH, launches)
    which = (
        f"weights' traffic, {central} is less" if traffic > step else f"{central}; weights' traffic {number(traffic)}"
    )
    parts = f"memory {number(memory)}, arithmetic {number(arithmetic)}, {number(launches)} launches"
    found.measurements += [
        Measured(workload, REFERENCE, "ms a step", (max(traffic, step),), note=which),
        Measured(workload, FLOOR, "ms a step", (floor,), note=parts),
    ]
    found.references[workload] = REFERENCE
    bounds = {central.replace(" ", "_"): step, REFERENCE: max(traffic, step), FLOOR: floor}
    if case.parts:
        bounds[case.model] = median[f"{ours}, {case.model}"]
    for name, bound in bounds.items():
        _key(found, f"ratio.{ours.replace(' ', '_')}/{name}", case, clients, round(median[ours] / bound, 4))


def _key(found: Section, name: str, case: Case, clients: int, value: float) -> None:
    """A number by model, by clients."""
    found.key(name, case.name, {**found.keys.get(name, {}).get(case.name, {}), str(clients): value})
