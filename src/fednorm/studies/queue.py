"""What is still to be played, study by study, and as much of it as fits into some minutes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache

from fednorm.data.verify import describe_dataset
from fednorm.errors import DivergedError, FednormError, LockedError
from fednorm.files import disk_errors
from fednorm.running.config import RunConfig
from fednorm.running.folder import RunFolder
from fednorm.running.on_clock import names_strategy
from fednorm.studies.client_statistics import Look, looks_of
from fednorm.studies.estimate import seconds_of, usual_seconds
from fednorm.studies.library import Library, key_of
from fednorm.studies.playing import Place, Watched, play_runs
from fednorm.studies.study import Study, cell_label

HOLD = 25.0
"""Minutes that a queue has unless told."""


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


def standing(study: Study, library: Library, precision: str | None = None) -> Standing:
    """How much of a study the library has, in a precision; where none is asked for, in the one that is shown."""
    cells = study.cells()
    have = [sum(library.has(cell.config, seed, precision) for seed in study.recipe.seeds) for cell in cells]
    return Standing(study, len(cells), sum(n == len(study.recipe.seeds) for n in have), sum(n > 0 for n in have))


@dataclass(frozen=True)
class Job:
    """One config with the seeds that are missing: played together, and counted as one."""

    study: str
    label: str
    config: RunConfig
    seeds: tuple[int, ...]

    @property
    def name(self) -> str:
        """Of its own among jobs."""
        key = key_of(self.config)
        return f"{key}-seed{self.seeds[0]}" if _is_alone(self.config) else key


def missing_jobs(studies: Sequence[Study], has: Callable[[RunConfig, int], bool]) -> Iterator[Job]:
    """What nobody `has`, in the order of the studies: the main readings of all of them, then the other ones."""
    seen = set[tuple[str, int]]()
    for variants in (False, True):
        for study in studies:
            for job in _jobs(study, variants):
                runs = {seed: (key_of(job.config), seed) for seed in job.seeds}
                seeds = tuple(seed for seed, run in runs.items() if run not in seen and not has(job.config, seed))
                seen.update(runs.values())
                if seeds:
                    yield replace(job, seeds=seeds)


def _jobs(study: Study, variants: bool) -> list[Job]:
    """All of a study, played or not: what has a stack for each seed alone first with the first seed, cell by cell."""
    seeds, jobs = study.recipe.seeds, list[Job]()
    for cell in study.cells(variants=variants):
        apart = [(seed,) for seed in seeds] if _is_alone(cell.config) else [seeds]
        jobs += [Job(study.id, cell_label(cell), cell.config, some) for some in apart]
    return sorted(jobs, key=lambda job: seeds.index(job.seeds[0]))


def _is_alone(config: RunConfig) -> bool:
    """Whether seeds of a config share no stack: those on a clock do not."""
    return names_strategy(config.method)


@contextmanager
def _claimed(job: Job, place: Place) -> Iterator[bool]:
    """Hold a job among the processes that play in one folder; whether nobody else does."""
    folder = RunFolder(place.work / "claims" / job.name)
    with disk_errors(folder.path):
        folder.path.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        try:
            held.enter_context(folder.locked())
        except LockedError:
            yield False
            return
        yield True


def play_next(
    studies: Sequence[Study], place: Place, minutes: float, watched: Watched, say: Callable[[str], None]
) -> int:
    """Play what is missing and likely to end in time; the number of runs that came to their end.

    Seeds that do not fit together are played one by one, as far as time goes. Data sets that are not here are passed
    over, and so is what another process plays in the same folder.
    """
    place.make_ready()

    @cache
    def told_of(name: str) -> bool:
        here = is_here(name, place.data_dir)
        if not here:
            say(_passed_over(name))
        return here

    looks = looks_of(studies)
    deadline = time.monotonic() + 60 * minutes
    played, too_long = 0, dict[str, float]()
    for job in missing_jobs(studies, place.has):
        if not told_of(job.config.data.name):
            continue
        if not _that_fit(job, job.seeds, place, deadline - time.monotonic()):
            alone = usual_seconds(job.config, 1, place)
            if alone >= 60 * minutes:
                too_long[job.study] = max(alone, too_long.get(job.study, 0.0))
            continue
        with _claimed(job, place) as ours:
            if not ours:
                say(f"{job.study}  {job.label}: another process is at it")
                continue
            count, ended = _play_job(job, place, watched, deadline, looks, say)
        played += count
        if not ended:
            say("time is over; what was stopped goes on from here the next time")
            break
    if too_long:
        say(too_long_text(too_long, minutes))
    return played


def too_long_text(seconds: Mapping[str, float], minutes: float) -> str:
    """Studies of which the longest run takes so many seconds, more than there are minutes, and what would do."""
    needed = ", ".join(f"{study} (needs --minutes {minutes_for(alone)})" for study, alone in seconds.items())
    return f"some runs take longer than {minutes:g} minutes seed by seed, and --next passes them over: {needed}"


def minutes_for(seconds: float) -> int:
    """Whole minutes in which a run is begun that should take so many seconds."""
    return math.floor(seconds / 60) + 1


def longest_seconds(study: Study, has: Callable[[RunConfig, int], bool]) -> float:
    """What the longest run that a study lacks should take on a GPU with one seed; 0 where it lacks none."""
    return max((seconds_of(job.config, 1, on_gpu=True) for job in missing_jobs([study], has)), default=0.0)


def _play_job(
    job: Job, place: Place, watched: Watched, deadline: float, looks: Mapping[str, Look], say: Callable[[str], None]
) -> tuple[int, bool]:
    """Play what nobody has played of a job; how many runs came to their end, and whether time sufficed for them."""
    place.library.look_again()
    waiting = tuple(seed for seed in job.seeds if not place.has(job.config, seed))
    played = 0
    while seeds := _that_fit(job, waiting, place, deadline - time.monotonic()):
        waiting = waiting[len(seeds) :]
        say(f"{job.study}  {job.label}  seeds {', '.join(map(str, seeds))}")
        try:
            if not play_runs([(job.config, seed) for seed in seeds], place, watched, deadline, looks):
                return played, False
        except DivergedError as error:  # which is kept: nobody plays it again
            say(f"{job.study}  {job.label}: {error}")
        except FednormError as error:  # of one job, and no reason to leave the machine idle
            say(f"{job.study}  {job.label}: {error}")
            break
        played += len(seeds)
    return played, True


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
        return usual_seconds(job.config, count, place) < left

    if not seeds or fits(len(seeds)):
        return seeds
    return seeds[:1] if fits(1) else ()
