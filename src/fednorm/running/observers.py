"""Those who watch a run: a progress line, TensorBoard. None of them can change what they watch."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO, cast

from fednorm.running.records import OnRow, RoundRow, RunId, number_text, score_of
from fednorm.running.stopping import Interrupted


@contextmanager
def watching(rounds: int, *, stream: TextIO | None, tensorboard: Path | None = None, runs: int = 1) -> Iterator[OnRow]:
    """One observer for all that was asked for; `stream` None is silent, a terminal gets bars and a file plain lines."""
    with ExitStack() as stack:
        observers: list[OnRow] = []
        if stream is not None:
            made = Bars(rounds, runs, stream) if stream.isatty() else PlainLines(rounds, runs, stream)
            observers.append(guarded(stack.enter_context(made)))
        if tensorboard is not None:
            observers.append(guarded(stack.enter_context(TensorBoard(tensorboard))))

        def tell_all(run: RunId, row: RoundRow) -> None:
            for observer in observers:
                observer(run, row)

        yield tell_all


def guarded(observer: OnRow) -> OnRow:
    """An observer whose first failure is its last: it warns once and is not asked again."""
    broken = False

    def tell(run: RunId, row: RoundRow) -> None:
        nonlocal broken
        if broken:
            return
        try:
            observer(run, row)
        except Interrupted:
            raise
        except Exception as error:
            broken = True
            name = type(observer).__name__
            print(f"warning: {name} failed ({error}); the run goes on without it", file=sys.stderr)

    return tell


class Pace:
    """Rounds per second and the time left, by run, from the rounds seen."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self._seconds: dict[RunId, list[float]] = defaultdict(list)

    def tell(self, run: RunId, row: RoundRow) -> str:
        """Text such as `4.2 rounds/s, 0:00:09 left`."""
        seconds = self._seconds[run]
        seconds.append(row.get("seconds", 0.0))
        rate = len(seconds) / max(sum(seconds), 1e-9)
        left = round((self.rounds - row["round"]) / rate)
        return f"{rate:.1f} rounds/s, {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"

    def seconds(self, run: RunId) -> float:
        """Seconds of the rounds seen of a run."""
        return sum(self._seconds[run])


def headline(row: RoundRow) -> str | None:
    """The global model's score of a round, if it was scored: `accuracy 71.2`."""
    metric, scores = row.get("metric"), row.get("eval", {})
    if metric is None or metric["name"] not in scores.get("pooled", {}):
        return None
    value = score_of(scores, "pooled", metric["name"])
    return f"{metric['name']} {number_text(value, metric['percent'])}"


class PlainLines:
    """For files and pipes: a line for every round that was scored, or for every run that is done if there are many."""

    def __init__(self, rounds: int, runs: int, stream: TextIO) -> None:
        self.pace = Pace(rounds)
        self.runs = runs
        self.finished = 0
        self.stream = stream

    def __enter__(self) -> PlainLines:
        return self

    def __exit__(self, *problem: object) -> None:
        return None

    def __call__(self, run: RunId, row: RoundRow) -> None:
        pace, score = self.pace.tell(run, row), headline(row)
        if self.runs == 1 and score:
            self._print(f"{run}  round {row['round']}/{self.pace.rounds}  {score}  {pace}")
        elif self.runs > 1 and row["round"] == self.pace.rounds:
            self.finished += 1
            took = self.pace.seconds(run)
            self._print(f"[{self.finished}/{self.runs}] {run}  {score}  {took:.0f} s")

    def _print(self, line: str) -> None:
        print(line, file=self.stream, flush=True)


class Bars:
    """One bar for each run at work, one line for each that is done."""

    def __init__(self, rounds: int, runs: int, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self.pace = Pace(rounds)
        self.runs = runs
        self.scores: dict[RunId, str] = {}
        self.tasks: dict[RunId, Any] = {}
        self.finished = 0
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(file=stream, highlight=False),
            transient=True,
        )

    def __enter__(self) -> Bars:
        self.progress.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self.progress.stop()

    def __call__(self, run: RunId, row: RoundRow) -> None:
        if run not in self.tasks:
            self.tasks[run] = self.progress.add_task(str(run), total=self.pace.rounds, note="")
        pace = self.pace.tell(run, row)
        self.scores[run] = headline(row) or self.scores.get(run, "")
        note = "  ".join(filter(None, (self.scores[run], pace)))
        self.progress.update(self.tasks[run], completed=row["round"], note=note)
        if row["round"] == self.pace.rounds:
            self.progress.remove_task(self.tasks[run])
            self.finished += 1
            counter = f"[{self.finished}/{self.runs}] " if self.runs > 1 else ""
            took = self.pace.seconds(run)
            self.progress.console.print(f"{counter}{run}  {self.scores[run]}  {took:.0f} s", markup=False)


class TensorBoard:
    """Scores, losses and bytes as TensorBoard events, one folder a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.writers: dict[RunId, Any] = {}

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *problem: object) -> None:
        for writer in self.writers.values():
            writer.close()

    def __call__(self, run: RunId, row: RoundRow) -> None:
        if run not in self.writers:
            from torch.utils.tensorboard import SummaryWriter

            # A resumed run writes the rounds after its last checkpoint again; the events of the first try give way.
            self.writers[run] = SummaryWriter(str(self.folder / run.file_name), purge_step=row["round"])
        writer = self.writers[run]
        for name in ("train_loss", "lr", "bytes_up", "bytes_down"):
            writer.add_scalar(f"round/{name}", row[name], row["round"])
        for protocol, scores in row.get("eval", {}).items():
            for name, value in cast("dict[str, Any]", scores).items():
                if isinstance(value, int | float):
                    writer.add_scalar(f"{protocol}/{name}", value, row["round"])
