"""Those who watch a run: a progress line, TensorBoard. None of them can change what they watch."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from fednorm.running.api import Interrupted
from fednorm.running.comparison import OnEvent
from fednorm.running.run import Row


@contextmanager
def watching(
    rounds: int, *, stream: TextIO | None, tensorboard: Path | None = None, runs: int = 1
) -> Iterator[OnEvent]:
    """One observer for all that was asked for; `stream` None is silent, a terminal gets bars and a file plain lines."""
    with ExitStack() as stack:
        observers: list[OnEvent] = []
        if stream is not None:
            made = Bars(rounds, runs, stream) if stream.isatty() else PlainLines(rounds, runs, stream)
            observers.append(guarded(stack.enter_context(made)))
        if tensorboard is not None:
            observers.append(guarded(stack.enter_context(TensorBoard(tensorboard))))

        def tell_all(method: str, seed: int, row: Row) -> None:
            for observer in observers:
                observer(method, seed, row)

        yield tell_all


def guarded(observer: OnEvent) -> OnEvent:
    """An observer whose first failure is its last: it warns once and is not asked again."""
    broken = False

    def tell(method: str, seed: int, row: Row) -> None:
        nonlocal broken
        if broken:
            return
        try:
            observer(method, seed, row)
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
        self._seconds: dict[tuple[str, int], list[float]] = defaultdict(list)

    def tell(self, method: str, seed: int, row: Row) -> str:
        """Text such as `4.2 rounds/s, 0:00:09 left`."""
        seconds = self._seconds[method, seed]
        seconds.append(row["seconds"])
        rate = len(seconds) / max(sum(seconds), 1e-9)
        left = round((self.rounds - row["round"]) / rate)
        return f"{rate:.1f} rounds/s, {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"

    def seconds(self, method: str, seed: int) -> float:
        """Seconds of the rounds seen of a run."""
        return sum(self._seconds[method, seed])


def headline(row: Row) -> str | None:
    """The global model's score of a round, if it was scored: `accuracy 71.2`."""
    pooled = row.get("eval", {}).get("pooled", {})
    return next((f"{name} {pooled[name]:.1f}" for name in ("accuracy", "miou") if name in pooled), None)


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

    def __call__(self, method: str, seed: int, row: Row) -> None:
        pace, score = self.pace.tell(method, seed, row), headline(row)
        if self.runs == 1 and score:
            self._print(f"{method} seed {seed}  round {row['round']}/{self.pace.rounds}  {score}  {pace}")
        elif self.runs > 1 and row["round"] == self.pace.rounds:
            self.finished += 1
            took = self.pace.seconds(method, seed)
            self._print(f"[{self.finished}/{self.runs}] {method} seed {seed}  {score}  {took:.0f} s")

    def _print(self, line: str) -> None:
        print(line, file=self.stream, flush=True)


class Bars:
    """One bar for each run at work, one line for each that is done."""

    def __init__(self, rounds: int, runs: int, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self.pace = Pace(rounds)
        self.runs = runs
        self.scores: dict[tuple[str, int], str] = {}
        self.tasks: dict[tuple[str, int], Any] = {}
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

    def __call__(self, method: str, seed: int, row: Row) -> None:
        run = (method, seed)
        name = f"{method} seed {seed}"
        if run not in self.tasks:
            self.tasks[run] = self.progress.add_task(name, total=self.pace.rounds, note="")
        pace = self.pace.tell(method, seed, row)
        self.scores[run] = headline(row) or self.scores.get(run, "")
        note = "  ".join(filter(None, (self.scores[run], pace)))
        self.progress.update(self.tasks[run], completed=row["round"], note=note)
        if row["round"] == self.pace.rounds:
            self.progress.remove_task(self.tasks[run])
            self.finished += 1
            place = f"[{self.finished}/{self.runs}] " if self.runs > 1 else ""
            took = self.pace.seconds(method, seed)
            self.progress.console.print(f"{place}{name}  {self.scores[run]}  {took:.0f} s", markup=False)


class TensorBoard:
    """Scores, losses and bytes as TensorBoard events, one folder a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.writers: dict[tuple[str, int], Any] = {}

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *problem: object) -> None:
        for writer in self.writers.values():
            writer.close()

    def __call__(self, method: str, seed: int, row: Row) -> None:
        if (method, seed) not in self.writers:
            from torch.utils.tensorboard import SummaryWriter

            name = re.sub(r"[^A-Za-z0-9.=-]+", "_", f"{method}-seed{seed}")
            # A resumed run writes the rounds after its last checkpoint again; the events of the first try give way.
            self.writers[method, seed] = SummaryWriter(str(self.folder / name), purge_step=row["round"])
        writer = self.writers[method, seed]
        for name in ("train_loss", "lr", "bytes_up", "bytes_down"):
            writer.add_scalar(f"round/{name}", row[name], row["round"])
        for protocol, scores in row.get("eval", {}).items():
            for name, value in scores.items():
                if isinstance(value, int | float):
                    writer.add_scalar(f"{protocol}/{name}", value, row["round"])
