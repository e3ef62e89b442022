"""Clocks: variants timed in turn, again and again in another order, on a machine that is watched for other work."""

from __future__ import annotations

import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from fednorm.errors import ConfigError

QUIET = 0.05
"""A timing counts if other programs took less than this share of the cores meanwhile."""
FOREVER = 1_000_000_000
"""Rounds, and rounds between two checkpoints or scorings: more than are ever played."""
LOOKS, STEADY = 6, 0.2
"""A run is warm when two looks at its rounds in a row differ by less than this share, and after so many in any case."""
AGREE = 1.25
"""How many times longer one way of timing may find a round than another."""
ENOUGH_ROWS = 10
"""Rows from which a round's time is taken; of fewer, each may be anything."""
TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100

Play = Callable[[float], float]
"""Plays for about this many seconds, and returns the seconds of one unit (a step, a round); for 0, only warms up."""
Tell = Callable[[str], None]


class Run(Protocol):
    """What is needed of a `fednorm.running.run.Run` to time it."""

    unsettled: list[Any]

    @property
    def round(self) -> int: ...

    def rounds(self) -> Generator[Any]: ...

    def settle(self, count: int) -> object: ...


def at_once() -> None:
    """Nothing to wait for."""


@dataclass(frozen=True)
class Effort:
    """How much time a benchmark may take."""

    turns: int = 5
    """timings of each variant; slow ones get fewer, at least two"""
    seconds: float = 0.5
    """of one timing, at least"""
    minutes: float = 0.0
    """how long to wait for quiet cores, in all"""
    ready: Callable[[], object] = at_once
    """called when all variants are warm, before the first is timed"""


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
        effort.ready()
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


class Rounds:
    """Plays on in a run's rounds, timed in two ways.

    The clock runs while the device has nothing else to do: all that was asked for before is finished when it starts,
    and all that was asked for meanwhile when it stops. So it does not matter in which bursts rows come. That is how a
    round was misjudged once: reports of one round are copied behind all that are under way, so a row that comes alone
    may have waited for thirty. What the rows themselves tell of a round is the other way. Those of a timing's first
    burst do not count: the host prepares two bursts before it looks at one, whose rows tell the time of both. Rows of
    its last burst that are still to come, come in the next timing.
    """

    def __init__(self, run: Run, device: torch.device) -> None:
        self._run, self._device = run, device
        self._rows = run.rounds()
        self._made_at = time.perf_counter()
        self.first_row: float | None = None
        """seconds until it came"""
        self.whole: list[float] = []
        """seconds of a round in each timing, by the clock"""
        self.told: list[float] = []
        """the same by each row that counts"""
        self._first_burst = 0
        """rounds that were played when a timing's first burst came, and no other"""

    def __call__(self, seconds: float) -> float:
        """Seconds of a round; for 0, warms up until two looks agree."""
        if seconds:
            return self._stretch(seconds)
        found = self._stretch(0.0)
        for _ in range(LOOKS - 1):
            before, found = found, self._stretch(0.0)
            if abs(found / before - 1) < STEADY:
                break
        self.whole.clear()
        self.told.clear()
        return found

    def _finish(self) -> float:
        """The moment when nothing is under way any more."""
        self._run.settle(len(self._run.unsettled))
        synchronize(self._device)
        return time.perf_counter()

    def _stretch(self, seconds: float) -> float:
        run = self._run
        started, first = self._finish(), run.round
        now = started
        while run.round == first or now - started < seconds:
            row = next(self._rows, None)
            if row is None:
                raise ConfigError(f"the run that is timed is over after {run.round} rounds; give fewer --seconds")
            now = time.perf_counter()
            if self.first_row is None:
                self.first_row = now - self._made_at
            if row["round"] == first + 1:
                self._first_burst = run.round
            if run.round != self._first_burst:
                self.told.append(row["seconds"])
        found = (self._finish() - started) / (run.round - first)
        self.whole.append(found)
        return found

    def count(self, what: Callable[[Callable[[], object]], int]) -> float:
        """What some counter finds in a few rounds, for one."""
        self._finish()
        first = self._run.round
        found = what(lambda: self._stretch(0.0))
        return found / (self._run.round - first)

    def close(self) -> None:
        """End the run. One that is merely forgotten ends too, but swallows an interrupt that comes just then."""
        self._rows.close()

    def disagree(self) -> str:
        """What the rows tell, where it is not what the clock says."""
        if len(self.told) < ENOUGH_ROWS:
            return ""
        whole, told = statistics.median(self.whole), statistics.median(self.told)
        if max(whole, told) <= AGREE * min(whole, told):
            return ""
        return (
            f"two clocks disagree: rows tell {1e3 * told:.3g} ms a round, timed as a whole it takes {1e3 * whole:.3g}"
        )


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
