"""How far a run is: bars in a terminal, lines in a file. A run that is taken up again counts on."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from fednorm.errors import visible
from fednorm.files import open_plain
from fednorm.running.folder import RunFolder
from fednorm.running.over_time import histogram
from fednorm.running.records import RoundRow, RunId, number_text, score_of


@dataclass(frozen=True)
class Before:
    """What there was of some runs when they were taken up again."""

    finished: int = 0
    """runs that had ended"""
    seconds: Mapping[RunId, Mapping[int, float]] = field(default_factory=dict)
    """seconds of the rounds of each run that had not, by number"""
    timed: frozenset[RunId] = frozenset()
    """runs on a clock, whose numbers are of versions"""


def done_before(folders: Mapping[RunId, Path], rounds: int) -> Before:
    """What the folders of some runs of so many rounds hold; those that are not there yet hold nothing.

    A run that has its result and fewer rounds was stopped early, or is to be trained on.
    """
    told = {run: _told(path) for run, path in folders.items()}
    seconds = {run: each for run, (each, _) in told.items()}
    ended = [run for run, path in folders.items() if rounds in seconds[run] and RunFolder(path).result.exists()]
    timed = frozenset(run for run, (_, is_timed) in told.items() if is_timed)
    return Before(len(ended), {run: each for run, each in seconds.items() if run not in ended}, timed)


def _told(folder: Path) -> tuple[dict[int, float], bool]:
    """Seconds by round, and whether rows have a virtual time.

    Rounds after the last checkpoint are played, and counted, again; a line may be torn.
    """
    metrics = RunFolder(folder).metrics
    found: dict[int, float] = {}
    timed = False
    if not os.path.lexists(metrics):
        return found, timed
    with open(open_plain(metrics), errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line)
                found[int(row["round"])] = float(row.get("seconds", 0.0))
                timed = timed or "time" in row
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                continue
    return found, timed


class Pace:
    """Rounds per second and the time left, by run, from the rounds seen; seconds of all, those before included.

    On a clock also the virtual time, and how stale the updates were that were seen.
    """

    def __init__(self, rounds: int, before: Before | None = None) -> None:
        self.rounds = rounds
        self._seen: Counter[RunId] = Counter()
        self._took: dict[RunId, float] = defaultdict(float)
        """how many rounds were seen of each run, and their seconds"""
        self._seconds: dict[RunId, dict[int, float]] = defaultdict(dict)
        self._stale: dict[RunId, Counter[str]] = defaultdict(Counter)
        for run, seconds in (before or Before()).seconds.items():
            self._seconds[run].update(seconds)

    def tell(self, run: RunId, row: RoundRow) -> str:
        """Text such as `4.2 rounds/s, 0:00:09 left`; the pace is today's, whatever machine played the first rounds."""
        seconds = row.get("seconds", 0.0)
        self._seconds[run][row["round"]] = seconds
        self._seen[run] += 1
        self._took[run] += seconds
        rate = self._seen[run] / max(self._took[run], 1e-9)
        left = round((self.rounds - row["round"]) / rate)
        told = f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
        if "time" not in row:
            return f"{rate:.1f} rounds/s, {told}"
        self._stale[run].update(map(str, row.get("staleness", ())))
        return f"time {row['time']:.4g}, {rate:.1f} versions/s, {told}, staleness {histogram(self._stale[run])}"

    def seconds(self, run: RunId) -> float:
        """Seconds of all rounds of a run so far."""
        return sum(self._seconds[run].values())


def headline(row: RoundRow) -> str | None:
    """The global model's score of a round, if it was scored: `accuracy 71.2`; where it has none, the clients' own."""
    metric, scores = row.get("metric"), row.get("eval", {})
    for protocol, whose in (("pooled", ""), ("own_client", "own-client ")):
        if metric is not None and metric["name"] in scores.get(protocol, {}):
            value = score_of(scores, protocol, metric["name"])
            return f"{whose}{metric['name']} {number_text(value, metric['percent'])}"
    return None


def unit_of(row: RoundRow) -> str:
    """What the number of a row counts: on a clock, versions of the server's model."""
    return "version" if "time" in row else "round"


def gone_on(before: Before, rounds: int, runs: int) -> Iterable[str]:
    """What is said first of runs that are taken up again."""
    if runs > 1 and before.finished:
        yield f"[{before.finished}/{runs}] done before"
    for run, seconds in before.seconds.items():
        if seconds:
            yield f"{run} goes on after {'version' if run in before.timed else 'round'} {max(seconds)}/{rounds}"


class PlainLines:
    """For files and pipes: a line for every round that was scored, or for every run that is done if there are many."""

    def __init__(self, rounds: int, runs: int, stream: TextIO, before: Before | None = None) -> None:
        before = before or Before()
        self.pace = Pace(rounds, before)
        self.runs = runs
        self.finished = before.finished
        self.stream = stream
        for line in gone_on(before, rounds, runs):
            self._print(line)

    def __enter__(self) -> PlainLines:
        return self

    def __exit__(self, *problem: object) -> None:
        return None

    def __call__(self, run: RunId, row: RoundRow) -> None:
        pace, score = self.pace.tell(run, row), headline(row)
        if self.runs == 1 and score:
            self._print(f"{run}  {unit_of(row)} {row['round']}/{self.pace.rounds}  {score}  {pace}")
        elif self.runs > 1 and row["round"] == self.pace.rounds:
            self.finished += 1
            took = self.pace.seconds(run)
            self._print("  ".join(filter(None, (f"[{self.finished}/{self.runs}] {run}", score, f"{took:.0f} s"))))

    def _print(self, line: str) -> None:
        print(visible(line), file=self.stream, flush=True)


class Bars:
    """One bar for each run at work, one line for each that is done."""

    def __init__(self, rounds: int, runs: int, stream: TextIO, before: Before | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        before = before or Before()
        self.pace = Pace(rounds, before)
        self.runs = runs
        self.scores: dict[RunId, str] = {}
        self.tasks: dict[RunId, Any] = {}
        self.finished = before.finished
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(file=stream, highlight=False),
            transient=True,
        )
        for line in gone_on(before, rounds, runs):
            self.progress.console.print(visible(line), markup=False)

    def __enter__(self) -> Bars:
        self.progress.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self.progress.stop()

    def __call__(self, run: RunId, row: RoundRow) -> None:
        if run not in self.tasks:
            self.tasks[run] = self.progress.add_task(visible(str(run)), total=self.pace.rounds, note="")
        pace = self.pace.tell(run, row)
        self.scores[run] = headline(row) or self.scores.get(run, "")
        note = "  ".join(filter(None, (self.scores[run], pace)))
        self.progress.update(self.tasks[run], completed=row["round"], note=note)
        if row["round"] == self.pace.rounds:
            self.progress.remove_task(self.tasks[run])
            self.finished += 1
            counter = f"[{self.finished}/{self.runs}] " if self.runs > 1 else ""
            took = self.pace.seconds(run)
            line = f"{counter}{run}  {self.scores[run]}  {took:.0f} s"
            self.progress.console.print(visible(line), markup=False)
