"""What `run`, `compare`, `resume` and `demo` have in common: watch, play, and say how to go on after a stop."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fednorm.cli.output import Stopped, print_json, print_scores
from fednorm.cli.own_files import tell_of_files
from fednorm.cli.settings import Asked
from fednorm.errors import require

if TYPE_CHECKING:
    from fednorm.running.records import OnRow
    from fednorm.running.results import Result


def play_run(asked: Asked) -> None:
    """Play the one run that was asked for and print what came out."""
    from fednorm.running.api import run

    tell_of_files(asked)
    out = place_of(asked, [asked.config.method])
    finish(asked, watch(asked, out, 1, lambda tell: run(asked.config, out=out, on_row=tell)))


def play_comparison(asked: Asked, methods: list[str]) -> None:
    """Play every method with every seed and print the table."""
    from fednorm.running.comparison import compare

    tell_of_files(asked)
    out = place_of(asked, methods)

    def work(tell: OnRow) -> Result:
        return compare(methods, asked.config, seeds=asked.seeds, out=out, jobs=asked.jobs, on_row=tell)

    finish(asked, watch(asked, out, len(methods) * len(asked.seeds), work))


def place_of(asked: Asked, methods: list[str]) -> Path:
    """The folder that was asked for, or a new one named after what runs."""
    return asked.out or fresh("compare" if len(methods) > 1 else methods[0])


def refuse_watchers(asked: Asked) -> None:
    """Refuse observers whose packages are missing."""
    if asked.tensorboard:
        require("tensorboard", "track", "--tensorboard")


def watch(asked: Asked, out: Path, runs: int, work: Callable[[OnRow], Result]) -> Result:
    """Do the work with the observers that were asked for; a signal ends it with a word on how to continue."""
    refuse_watchers(asked)
    from fednorm.running.observers import watching
    from fednorm.running.stopping import Interrupted

    stream = None if asked.quiet else sys.stderr if asked.json else sys.stdout
    events = out / "tensorboard" if asked.tensorboard else None
    try:
        with watching(asked.config.rounds, stream=stream, tensorboard=events, runs=runs) as tell:
            return work(tell)
    except Interrupted as stop:
        raise Stopped(how_to_go_on(out, asked.code_in_file), stop.exit_code) from None


def how_to_go_on(out: Path, code: bool) -> str:
    """What a stopped run tells its user."""
    command = f"fednorm resume {out}" + (" --allow-code" if code else "")
    rounds = rounds_done(out)
    return f"stopped{'' if rounds is None else f' after round {rounds}'}; continue with: {command}"


def rounds_done(out: Path) -> int | None:
    """Rounds that a stopped run keeps; None for a comparison, which has many runs."""
    from fednorm.running.folder import RunFolder
    from fednorm.running.store import Store

    folder = RunFolder(out)
    if not folder.state.exists():
        return None
    store = Store(folder.state)
    try:
        return store.facts().get("round", 0)
    finally:
        store.close()


def finish(asked: Asked, result: Result) -> None:
    """Print a result, as a table or as JSON."""
    from fednorm.running.records import number_text, score_of

    if asked.json:
        print_json({**result.to_json(), "folder": result.folder})
        return
    print_scores(result)
    for line in dict.fromkeys(f"{run['method']}: {note}" for run in result.runs for note in run["notes"]):
        print(line)
    for run in result.runs:
        if run["best_validation"]:
            best = run["best_validation"]
            scores = ", ".join(
                f"{name} {number_text(score_of(best, name, result.metric), result.percent)}"
                for name in best
                if name not in ("round", "validation")
            )
            print(f"{run['method']} seed {run['seed']}: best validation in round {best['round']}: {scores}")
    print(f"folder: {result.folder}")


def fresh(name: str) -> Path:
    """A new folder below runs/, named after what runs."""
    from fednorm.running.folder import fresh_folder

    return fresh_folder(Path("runs"), name)
