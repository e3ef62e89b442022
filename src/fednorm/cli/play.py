"""What `run`, `compare`, `resume` and `demo` have in common: watch, play, and say how to go on after a stop."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fednorm.cli.output import Stopped, print_json, print_scores
from fednorm.cli.settings import Request
from fednorm.errors import require

if TYPE_CHECKING:
    from fednorm.running.observers import OnEvent
    from fednorm.running.results import Result


def play_run(request: Request) -> None:
    """Play the one run of a request and print what came out."""
    from fednorm.running.api import run

    out = request.out or fresh(request.config.method)

    def work(tell: OnEvent) -> Result:
        return run(request.config, out=out, on_round=lambda plan, row: tell(plan.method.name, plan.config.seed, row))

    finish(request, watch(request, out, 1, work))


def play_comparison(request: Request, methods: list[str]) -> None:
    """Play every method with every seed and print the table."""
    from fednorm.running.comparison import compare

    out = request.out or fresh("compare" if len(methods) > 1 else methods[0])

    def work(tell: OnEvent) -> Result:
        return compare(methods, config=request.config, seeds=request.seeds, out=out, jobs=request.jobs, on_event=tell)

    finish(request, watch(request, out, len(methods) * len(request.seeds), work))


def watch(request: Request, out: Path, runs: int, work: Callable[[OnEvent], Result]) -> Result:
    """Do the work with the observers that were asked for; a signal ends it with a word on how to continue."""
    if request.tensorboard:
        require("tensorboard", "track", "--tensorboard")
    from fednorm.running.api import Interrupted
    from fednorm.running.observers import watching

    stream = None if request.quiet else sys.stderr if request.json else sys.stdout
    events = out / "tensorboard" if request.tensorboard else None
    try:
        with watching(request.config.rounds, stream=stream, tensorboard=events, runs=runs) as tell:
            return work(tell)
    except Interrupted as stop:
        raise Stopped(how_to_go_on(out, request.code_in_file), stop.exit_code) from None


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


def finish(request: Request, result: Result) -> None:
    """Print a result, as a table or as JSON."""
    if request.json:
        print_json({**result.to_json(), "folder": result.folder})
        return
    print_scores(result)
    for line in dict.fromkeys(f"{run['method']}: {note}" for run in result.runs for note in run["notes"]):
        print(line)
    for run in result.runs:
        if run["best_validation"]:
            best = run["best_validation"]
            scores = ", ".join(
                f"{name} {best[name][result.metric]:.1f}" for name in best if name not in ("round", "validation")
            )
            print(f"{run['method']} seed {run['seed']}: best validation in round {best['round']}: {scores}")
    print(f"folder: {result.folder}")


def fresh(name: str) -> Path:
    """A new folder below runs/, named after what runs."""
    from fednorm.running.folder import fresh_folder

    return fresh_folder(Path("runs"), re.sub(r"[^A-Za-z0-9.=-]+", "_", name).strip("_"))
