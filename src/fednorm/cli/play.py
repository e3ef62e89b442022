"""What `run`, `compare`, `resume` and `demo` have in common: watch, play, and say how to go on after a stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fednorm.cli.output import Stopped, echo, print_json, print_scores, progress_stream, say
from fednorm.cli.own_files import tell_of_files
from fednorm.cli.settings import Asked

if TYPE_CHECKING:
    from fednorm.running.records import OnRow, RunId
    from fednorm.running.results import Result


def play_run(asked: Asked) -> None:
    """Play the one run that was asked for and print what came out."""
    from fednorm.running.api import run
    from fednorm.running.extensions import with_extensions
    from fednorm.running.on_clock import settled

    tell_of_files(asked)
    asked = replace(asked, config=settled(with_extensions(asked.config)))
    out = place_of(asked, [asked.config.method])
    folders = one_folder(asked, out)
    finish(asked, watch(asked, out, folders, lambda tell: run(asked.config, out=out, on_row=tell)))


def play_comparison(asked: Asked, methods: list[str]) -> None:
    """Play every method with every seed and print the table."""
    from fednorm.running.comparison import compare
    from fednorm.running.extensions import with_extensions
    from fednorm.running.on_clock import on_one_clock

    tell_of_files(asked)
    methods = on_one_clock(methods, with_extensions(asked.config))[1]
    out = place_of(asked, methods)

    def work(tell: OnRow) -> Result:
        return compare(methods, asked.config, seeds=asked.seeds, out=out, jobs=asked.jobs, on_row=tell)

    finish(asked, watch(asked, out, all_folders(methods, asked.seeds, out), work))


def place_of(asked: Asked, methods: list[str]) -> Path:
    """The folder that was asked for, or a new one named after what runs."""
    return asked.out or fresh("compare" if len(methods) > 1 else methods[0])


def one_folder(asked: Asked, out: Path) -> dict[RunId, Path]:
    """The one run that is asked for, with its folder."""
    return {_run_id(asked.config.method, asked.config.seed): out}


def all_folders(methods: Iterable[str], seeds: Iterable[int], out: Path) -> dict[RunId, Path]:
    """The runs of a comparison, each with its folder."""
    ids = [_run_id(method, seed) for seed in seeds for method in methods]
    return {run: out / run.file_name for run in ids}


def _run_id(expression: str, seed: int) -> RunId:
    from fednorm.core.expression import parse_terms
    from fednorm.running.records import RunId

    return RunId("+".join(map(str, parse_terms(expression, "method", "fixbn(at=0.5)"))), seed)


def refuse_watchers(asked: Asked) -> None:
    """Refuse observers that are not known, or whose packages are missing."""
    from fednorm.running.trackers import check_tracker

    for name, flag in asked.trackers.items():
        check_tracker(name, flag)


def watch(asked: Asked, out: Path, folders: Mapping[RunId, Path], work: Callable[[OnRow], Result]) -> Result:
    """Do the work with the observers that were asked for; a signal ends it with a word on how to continue."""
    refuse_watchers(asked)
    from fednorm.running.config import flat
    from fednorm.running.observers import Tracking, watching
    from fednorm.running.progress import done_before
    from fednorm.running.stopping import Interrupted

    stream = progress_stream(asked.quiet, asked.json)
    tracking = Tracking(list(asked.trackers), out, flat(asked.config))
    before = done_before(folders, asked.config.rounds)
    try:
        with watching(asked.config.rounds, stream=stream, tracking=tracking, runs=len(folders), before=before) as tell:
            return work(tell)
    except Interrupted as stop:
        raise Stopped(how_to_go_on(asked, out, folders), stop.exit_code) from None


def how_to_go_on(asked: Asked, out: Path, folders: Mapping[RunId, Path]) -> str:
    """What a stopped run tells its user."""
    from fednorm.running.progress import done_before

    flags = [*asked.trackers.values(), *["--allow-code"] * asked.code_in_file]
    done = f" with {done_before(folders, asked.config.rounds).finished} of {len(folders)} runs done"
    if len(folders) == 1:
        from fednorm.running.on_clock import names_strategy

        rounds, unit = rounds_done(out), "version" if names_strategy(asked.config.method) else "round"
        done = "" if rounds is None else f" after {unit} {rounds}"
    return f"stopped{done}; continue with: {' '.join(['fednorm resume', str(out), *flags])}"


def rounds_done(out: Path) -> int | None:
    """Rounds that a stopped run keeps; None where it had not begun."""
    from fednorm.running.folder import RunFolder
    from fednorm.running.store import Store

    folder = RunFolder(out)
    if not folder.state.exists():
        return None
    with closing(Store(folder.state)) as store:
        return store.facts().get("round", 0)


def finish(asked: Asked, result: Result) -> None:
    """Print a result, as a table or as JSON; a comparison also says what it showed, and draws it."""
    from fednorm.running.over_time import is_timed
    from fednorm.running.records import number_text, score_of
    from fednorm.views.seen import draw_curves, what_was_seen

    several = len(result.runs) > 1 and result.folder is not None
    seen = what_was_seen(result) if several else None
    picture = draw_curves(result, asked.config, Path(str(result.folder))) if several else None
    if asked.json:
        drawn = {"seen": seen, "picture": picture} if several else {}
        print_json({**result.to_json(), "folder": result.folder, **drawn})
        return
    print_scores(result)
    for line in note_lines(result):
        say(line)
    for run in result.runs:
        if run["best_validation"]:
            best = run["best_validation"]
            scores = ", ".join(
                f"{name} {number_text(score_of(best, name, result.metric), result.percent)}"
                for name in best
                if name not in ("round", "validation")
            )
            where = f"{'version' if is_timed(run) else 'round'} {best['round']}"
            say(f"{run['method']} seed {run['seed']}: best validation in {where}: {scores}")
    if seen:
        echo()
        say(seen, indent="")
    if several:
        echo(f"curves: {picture}" if picture else 'no picture of the curves: pip install "fednorm[report]"')
    echo(f"folder: {result.folder}")


def note_lines(result: Result) -> list[str]:
    """What is to be known of the runs: a line for each method, and one for what is true of all."""
    methods: dict[str, dict[str, None]] = {}
    for run in result.runs:
        for note in run["notes"]:
            methods.setdefault(note, {})[run["method"]] = None
    everyone = len(result.methods)
    lines = []
    for note, who in methods.items():
        lines += [f"all: {note}"] if len(who) == everyone > 1 else [f"{method}: {note}" for method in who]
    return lines


def fresh(name: str) -> Path:
    """A new folder below runs/, named after what runs."""
    from fednorm.running.folder import fresh_folder

    return fresh_folder(Path("runs"), name)
