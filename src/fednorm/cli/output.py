"""What commands print: JSON or tables on stdout, complaints as one line on stderr."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

from fednorm.cli.table import Table, fitted, wrapped
from fednorm.errors import visible
from fednorm.files import json_text

if TYPE_CHECKING:
    from fednorm.running.results import Result

HEADINGS = {"pooled": "pooled test", "own_client": "own-client test", "domains": "domains", "unseen": "unseen clients"}
FOOTNOTES = {
    "averaged local state": "pooled test uses the mean of the clients' local state",
    "averaged local state of the last cohort": "pooled test uses the mean of the last round's clients' local state",
    "mean over the clients' own models": "pooled test is the mean over the clients' own models, each on the whole set",
}
_MARKS = "*†‡§"


class Stopped(Exception):
    """A command ended early because it was asked to; the text says how to go on."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def echo(text: object = "", file: TextIO | None = None, flush: bool = False) -> None:
    """Print a text; what is foreign in it does nothing to a terminal."""
    print(visible(str(text)), file=file, flush=flush)


def complain(problem: object) -> None:
    """One line on stderr; where that cannot be written, the exit code has to say it all."""
    with suppress(OSError):
        echo(f"error: {' '.join(str(problem).split())}", file=sys.stderr)


def print_json(value: Any) -> None:
    print(json_text(value, indent=2))


def progress_stream(quiet: bool, json: bool) -> TextIO | None:
    """Where progress is told: not where JSON is all that may be said, and nowhere if nobody wants it."""
    return None if quiet else sys.stderr if json else sys.stdout


def width() -> int | None:
    """Columns there are for a line: those of the terminal, or what COLUMNS says; a file or pipe has no width."""
    if not sys.stdout.isatty() and not os.environ.get("COLUMNS", "").isdecimal():
        return None
    return max(40, shutil.get_terminal_size().columns)


def say(text: str, indent: str = "  ") -> None:
    """Print a text, in a terminal broken between words; lines after the first are indented."""
    print("\n".join(wrapped(visible(text), width(), indent)))


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Collection[str] = (),
    spare: Sequence[str] = (),
    readable: int = 20,
) -> None:
    """A plain table; `numbers` are aligned to the right.

    Where a terminal is so narrow that columns of text would get less than `readable`, `spare` ones are left out.
    """
    from rich.console import Console
    from rich.text import Text

    shown = [[visible(cell) for cell in row] for row in rows]
    laid = fitted(Table(columns, shown, numbers, spare, readable), width())
    # Text: names such as [report] are no markup; the lines are laid out already.
    Console(highlight=False).print(Text("\n".join(laid.heading), style="bold"), soft_wrap=True)
    for line in laid.body:
        print(line)
    if laid.left_out:
        say(f"left out in {width()} columns: {', '.join(laid.left_out)}; a wider window, a pipe or --json has them")


def size_text(count: float) -> str:
    """Bytes for people.

    >>> size_text(779), size_text(155_800), size_text(44_765_000)
    ('779 B', '155.8 kB', '44.8 MB')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} B"


def print_scores(result: Result) -> None:
    """The table of a comparison, with a note on every cell that is not the global model's."""
    from fednorm.running.over_time import histogram
    from fednorm.running.results import cell_text, time_columns

    lines = result.table()
    timed = time_columns(lines)
    shown = [name for name in HEADINGS if any(name in line for line in lines)]
    marks: dict[str, str] = {}
    rows = []
    for number, line in enumerate(lines):
        how = line["how"]
        if how in FOOTNOTES and how not in marks:
            marks[how] = _MARKS[len(marks)]
        cells = [
            cell_text(line.get(name), result.percent)
            + (marks.get(how, "") if name == "pooled" and name in line else "")
            for name in shown
        ]
        sent = size_text(line["bytes_per_round"]) if line["bytes_per_round"] else "-"
        rows.append([line["method"], *cells, *(column[number] for column in timed.values()), sent])
    sent = "sent per version" if timed else "sent per round"
    headings = [*(HEADINGS[name] for name in shown), *timed, sent]
    print_table(["method", *headings], rows, numbers=headings)
    for how, mark in marks.items():
        say(f"{mark} {FOOTNOTES[how]}")
    seeds = lines[0]["seeds"]
    over = (
        f"mean ± standard deviation over seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {seeds[0]}"
    )
    unit = " in percent" if result.percent else ""
    better = "" if result.higher_is_better else ", lower is better"
    say(f"{result.metric}{unit} after the last {'version' if timed else 'round'}{better}, {over}")
    for run in result.runs:
        if "staleness" in run:
            say(f"{run['method']} seed {run['seed']}: staleness {histogram(run['staleness'])}")
