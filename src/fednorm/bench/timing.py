"""Clocks: variants timed in turn, again and again in another order, on a machine that is watched for other work."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

QUIET = 0.05
"""A timing counts if other programs took less than this share of the cores meanwhile."""
FOREVER = 1_000_000_000
"""Rounds, and rounds between two checkpoints or scorings: more than are ever played."""
TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100

Play = Callable[[float], float]
"""Plays for about this many seconds, and returns the seconds of one unit (a step, a round); for 0, only warms up."""
Tell = Callable[[str], None]


class Run(Protocol):
    """What is needed of a `fednorm.running.run.Run` to time it."""

    unsettled: list[Any]

    @property
    def round(self) -> int: ...

    def rounds(self) -> Iterator[Any]: ...


@dataclass(frozen=True)
class Effort:
    """How much time a benchmark may take."""

    turns: int = 5
    """timings of each variant; slow ones get fewer, at least two"""
    seconds: float = 0.5
    """of one timing, at least"""
    minutes: float = 0.0
    """how long to wait for quiet cores, in all"""


@dataclass(frozen=True)
class Timing:
    """Seconds of one unit, and which share of the cores other programs took meanwhile."""

    seconds: float
    foreign: float = 0.0

    @property
    def quiet(self) -> bool:
        return self.foreign < QUIET


@dataclass
class Race:
    """Timings by variant, there to be read at any moment of a race."""

    times: dict[str, list[Timing]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def run(self, variants: Mapping[str, Play], effort: Effort, tell: Tell) -> None:
        """Time every variant until each has its quiet timings, or patience ends."""
        draw = random.Random(0)  # noqa: S311
        for name, play in variants.items():
            tell(f"warming up {name}")
            play(0.0)
        deadline = time.perf_counter() + 60 * effort.minutes
        spent = dict.fromkeys(variants, 0.0)
        self.times |= {name: [] for name in variants}

        def lacks(name: str) -> bool:
            turns, late = self.times[name], time.perf_counter() > deadline
            slow = spent[name] > 2 * effort.turns * effort.seconds
            wanted = min(2, effort.turns) if slow else effort.turns
            return sum(turn.quiet or late for turn in turns) < wanted and not (late and len(turns) >= wanted)

        while lacking := [name for name in variants if lacks(name)]:
            draw.shuffle(lacking)
            for name in lacking:
                tell(f"{name}, timing {len(self.times[name]) + 1}")
                wait_for_quiet(deadline)
                started = time.perf_counter()
                self.times[name].append(timed(variants[name], effort.seconds))
                spent[name] += time.perf_counter() - started


def timed(play: Play, seconds: float) -> Timing:
    """One timing, with what other programs did meanwhile."""
    before, started = foreign_seconds(), time.perf_counter()
    found = play(seconds)
    wall = time.perf_counter() - started
    return Timing(found, max(0.0, foreign_seconds() - before) / ((os.cpu_count() or 1) * wall))


def wait_for_quiet(deadline: float) -> None:
    """Until the cores are idle, or the deadline."""
    while time.perf_counter() < deadline and not timed(_sleep, 0.3).quiet:
        pass


def _sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def foreign_seconds() -> float:
    """CPU seconds that others than this program and its processes have used; 0 where the system does not tell."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, stat.read_text().split()[1:9])
    ended = os.times()
    own = time.process_time() + ended.children_user + ended.children_system
    for child in multiprocessing.active_children():
        own += sum(map(int, Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[11:13])) / TICKS
    return (user + nice + system + irq + softirq + steal) / TICKS - own


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def repeated(unit: Callable[[], object], device: torch.device) -> Play:
    """Plays a function again and again; a GPU is waited for at the ends only."""

    def play(seconds: float) -> float:
        synchronize(device)
        started, count, batch = time.perf_counter(), 0, 1
        while count == 0 or time.perf_counter() - started < seconds:
            for _ in range(batch):
                unit()
            synchronize(device)
            count += batch
            batch = min(2 * batch, 64)  # few waits where units are short, few units where they are long
        return (time.perf_counter() - started) / count

    return play


def rounds_of(run: Run) -> Play:
    """Plays on in a run's rounds. Rows come one by one, or a GPU's in bursts, while it plays the next.

    The clock runs from the end of one burst to that of another, with the GPU at work all the time between. What it
    finished before, while others were timed, is left out.
    """
    rows = run.rounds()

    def burst() -> tuple[float, int]:
        """When the next burst was finished, and of how many rounds it was."""
        row = next(rows)
        moment, first = time.perf_counter(), row["round"]
        while row["round"] < run.round - len(run.unsettled):
            row = next(rows)
        return moment, row["round"] - first + 1

    def play(seconds: float) -> float:
        started, _ = burst()
        if run.unsettled:
            started, _ = burst()
        now, count = started, 0
        while count == 0 or now - started < seconds:
            now, size = burst()
            count += size
        return (now - started) / count

    return play


def steady_seconds(started: float, at: Sequence[float]) -> float | None:
    """Seconds of a round from the moments its rows came, None while too few have come.

    Rows that come at once were finished together, so only the first of a burst tells the time. From the first row of
    one burst to that of another, all rounds of the bursts after the first are done. The first burst of all may have
    waited for us, and is left out.

    >>> steady_seconds(0.0, [1.0, 2.0, 3.0, 4.0, 5.0])
    1.0
    >>> steady_seconds(0.0, [2.0, 2.0, 4.0, 4.0, 6.0, 6.0, 8.0, 8.0])
    1.0
    """
    waits = [now - before for before, now in zip([started, *at], at, strict=False)]
    usual = (at[-1] - started) / len(at) / 2
    firsts = [index for index, wait in enumerate(waits) if wait >= usual][1:]
    if len(firsts) < 3:
        return None
    return (at[firsts[-2]] - at[firsts[0]]) / (firsts[-1] - firsts[1])
