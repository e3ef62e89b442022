"""What is still to be played, study by study, and as much of it as fits into some minutes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from fednorm.data.verify import describe_dataset
from fednorm.errors import FednormError
from fednorm.running.config import RunConfig
from fednorm.studies.client_statistics import looks_of
from fednorm.studies.estimate import usual_seconds
from fednorm.studies.library import Library, key_of
from fednorm.studies.playing import Place, Watched, play_runs
from fednorm.studies.study import Study, StudyCell


@dataclass(frozen=True)
class Standing:
    """How far a study is, in cells of its main reading with all its seeds."""

    study: Study
    cells: int
    done: int
    begun: int
    """cells with at least one seed"""

    @property
    def state(self) -> str:
        return "done" if self.done == self.cells else "partly" if self.begun else "open"


def standing(study: Study, library: Library) -> Standing:
    """How much of a study the library has."""
    cells = study.cells()
    have = [sum(library.has(cell.config, seed) for seed in study.recipe.seeds) for cell in cells]
    return Standing(study, len(cells), sum(n == len(study.recipe.seeds) for n in have), sum(n > 0 for n in have))


@dataclass(frozen=True)
class Job:
    """One config with the seeds that are missing: played together, and counted as one."""

    study: str
    label: str
    config: RunConfig
    seeds: tuple[int, ...]


def missing_jobs(studies: Sequence[Study], library: Library) -> Iterator[Job]:
    """What is missing, in the order of the studies: the main readings of all of them, then the other ones."""
    seen = set[str]()
    for variants in (False, True):
        for study in studies:
            for cell in study.cells(variants=variants):
                key = key_of(cell.config)
                seeds = tuple(seed for seed in study.recipe.seeds if not library.has(cell.config, seed))
                if seeds and key not in seen:
                    yield Job(study.id, cell_label(cell), cell.config, seeds)
                seen.add(key)


def play_next(
    studies: Sequence[Study], place: Place, minutes: float, watched: Watched, say: Callable[[str], None]
) -> int:
    """Play what is missing and likely to end in time; the number of runs that came to their end.

    Seeds that do not fit together are played one by one, as far as time goes. Data sets that are not here are passed
    over.
    """

    @cache
    def told_of(name: str) -> bool:
        here = is_here(name, place.data_dir)
        if not here:
            say(_passed_over(name))
        return here

    looks = looks_of(studies)
    deadline = time.monotonic() + 60 * minutes
    played, too_long = 0, float("inf")
    for job in missing_jobs(studies, place.library):
        waiting = job.seeds if told_of(job.config.data.name) else ()
        if waiting and not _that_fit(job, waiting, place, deadline - time.monotonic()):
            too_long = min(too_long, usual_seconds(job.config, 1, place.on_gpu, place.library))
        while seeds := _that_fit(job, waiting, place, deadline - time.monotonic()):
            waiting = waiting[len(seeds) :]
            say(f"{job.study}  {job.label}  seeds {', '.join(map(str, seeds))}")
            try:
                ended = play_runs([(job.config, seed) for seed in seeds], place, watched, deadline, looks)
            except FednormError as error:  # of one job, and no reason to leave the machine idle
                say(f"{job.study}  {job.label}: {error}")
                break
            if not ended:
                say("time is over; what was stopped goes on from here the next time")
                return played
            played += len(seeds)
    if not played and too_long < float("inf"):
        say(f"nothing that is missing is likely to end in time: the shortest takes about {too_long / 60:.0f} minutes")
    return played


def is_here(name: str, data_dir: str | None) -> bool:
    """Whether a data set is on this machine."""
    return bool(describe_dataset(name, data_dir)["here"])


def with_data(
    runs: Sequence[tuple[RunConfig, int]], place: Place, say: Callable[[str], None]
) -> list[tuple[RunConfig, int]]:
    """Those whose data are here; all of them, to be refused with what is missing, where none are."""
    here = {name: is_here(name, place.data_dir) for name in dict.fromkeys(config.data.name for config, _ in runs)}
    if not any(here.values()):
        return list(runs)
    for name in here:
        if not here[name]:
            say(_passed_over(name))
    return [run for run in runs if here[run[0].data.name]]


def _passed_over(name: str) -> str:
    return f"{name} is not here: what needs it is passed over (`fednorm data info {name}` says how to get it)"


def _that_fit(job: Job, seeds: tuple[int, ...], place: Place, left: float) -> tuple[int, ...]:
    """Those of a job's seeds that should end in time: all of them together, the first, or none."""

    def fits(count: int) -> bool:
        return usual_seconds(job.config, count, place.on_gpu, place.library) < left

    if not seeds or fits(len(seeds)):
        return seeds
    return seeds[:1] if fits(1) else ()


def cell_label(cell: StudyCell) -> str:
    """A cell in a line: what sets it apart.

    A variant is named last, in brackets.
    """
    setting = "".join(f" {key}={value}" for key, value in cell.setting.items() if key != cell.score.select)
    return f"{cell.method}{setting}" + (f" [{cell.variant}]" if cell.variant else "")
