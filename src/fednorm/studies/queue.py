"""What is still to be played, study by study, and as much of it as fits into some minutes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from fednorm.data.verify import describe_dataset
from fednorm.errors import FednormError
from fednorm.running.config import RunConfig
from fednorm.studies.client_statistics import Look, look_of
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
    look: Look | None = None


def missing_jobs(studies: Sequence[Study], library: Library) -> Iterator[Job]:
    """What is missing, in the order of the studies: the main readings of all of them, then the other ones."""
    seen = set[str]()
    for variants in (False, True):
        for study in studies:
            for cell in study.cells(variants=variants):
                key = key_of(cell.config)
                seeds = tuple(seed for seed in study.recipe.seeds if not library.has(cell.config, seed))
                if seeds and key not in seen:
                    yield Job(study.id, _label(cell), cell.config, seeds, look_of(study.recipe))
                seen.add(key)


def play_next(
    studies: Sequence[Study], place: Place, minutes: float, watched: Watched, say: Callable[[str], None]
) -> int:
    """Play what is missing and likely to end in time; the number of runs that came to their end.

    Seeds that do not fit together are played one by one, as far as time goes. Data sets that are not here are passed
    over.
    """

    @cache
    def is_here(name: str) -> bool:
        here = bool(describe_dataset(name, place.data_dir)["here"])
        if not here:
            say(f"{name} is not here: its studies are passed over (`fednorm data info {name}` says how to get it)")
        return here

    deadline = time.monotonic() + 60 * minutes
    played = 0
    for job in missing_jobs(studies, place.library):
        waiting = job.seeds if is_here(job.config.data.name) else ()
        while seeds := _that_fit(job, waiting, place, deadline - time.monotonic()):
            waiting = waiting[len(seeds) :]
            say(f"{job.study}  {job.label}  seeds {', '.join(map(str, seeds))}")
            try:
                ended = play_runs([(job.config, seed) for seed in seeds], place, watched, deadline, job.look)
            except FednormError as error:  # of one job, and no reason to leave the machine idle
                say(f"{job.study}  {job.label}: {error}")
                break
            if not ended:
                say("time is over; what was stopped goes on from here the next time")
                return played
            played += len(seeds)
    return played


def _that_fit(job: Job, seeds: tuple[int, ...], place: Place, left: float) -> tuple[int, ...]:
    """Those of a job's seeds that should end in time: all of them together, the first, or none."""

    def fits(count: int) -> bool:
        return usual_seconds(job.config, count, place.on_gpu, place.library) < left

    if not seeds or fits(len(seeds)):
        return seeds
    return seeds[:1] if fits(1) else ()


def _label(cell: StudyCell) -> str:
    """A cell in a line: what sets it apart.

    A variant is named last, in brackets.
    """
    setting = "".join(f" {key}={value}" for key, value in cell.setting.items() if key != cell.score.select)
    return f"{cell.method}{setting}" + (f" [{cell.variant}]" if cell.variant else "")
