"""`fednorm reproduce`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from fednorm.cli.flags import Json, Quiet, option
from fednorm.cli.output import Stopped, echo, print_json, print_table, progress_stream, say
from fednorm.cli.settings import read_seeds
from fednorm.errors import ConfigError, DivergedError

if TYPE_CHECKING:
    from fednorm.running.config import RunConfig
    from fednorm.studies.measured import Measured
    from fednorm.studies.playing import Place, Watched
    from fednorm.studies.study import Study

_WHAT, _WHERE, _OUTPUT = "What to play", "Where", "Output"

Id = Annotated[str | None, typer.Argument(metavar="[ID]", help="experiment, such as fixbn.norms; --list names all")]
List = Annotated[bool, option("--list", help="list all experiments and how far each is", panel=_OUTPUT)]
Quick = Annotated[
    bool, option("--quick", help="a small budget on embedded data, in minutes; not the paper's setting", panel=_WHAT)
]
Seeds = Annotated[
    str | None,
    option("--seeds", metavar="N|LIST", help="how many seeds, or a list: 0,1,2; default: the recipe's", panel=_WHAT),
]
Methods = Annotated[
    str | None, option("--methods", metavar="LIST", help="some of its methods, such as fedavg_bn,fixbn", panel=_WHAT)
]
Where = Annotated[
    list[str] | None,
    option(
        "--where",
        metavar="AXIS=VALUE",
        help="some of its settings, such as momentum=local, or one other reading: variant=no_decay; repeatable",
        panel=_WHAT,
    ),
]
Variants = Annotated[bool, option("--variants", help="also other readings of the paper", panel=_WHAT)]
Show = Annotated[bool, option("--show", help="play nothing: print what is there, and draw it into --work", panel=_WHAT)]
Next = Annotated[bool, option("--next", help="play what is missing, study after study", panel=_WHAT)]
Minutes = Annotated[
    float | None,
    option("--minutes", metavar="X", help="with --next: begin only what should end in time; default: 25", panel=_WHAT),
]
Results = Annotated[
    Path | None,
    option(
        "--results",
        metavar="DIR",
        help="folder of the results, one file a run and seed; default: studies/results, and quick-results in --work "
        "for --quick",
        panel=_WHERE,
    ),
]
Work = Annotated[
    Path, option("--work", metavar="DIR", help="folder of the runs that are played, and of pictures", panel=_WHERE)
]
DataDir = Annotated[
    str | None, option("--data-dir", metavar="DIR", help="folder with data sets, else FEDNORM_DATA", panel=_WHERE)
]
Device = Annotated[str, option("--device", metavar="NAME", help="auto, cpu, cuda or cuda:1", panel=_WHERE)]
Precision = Annotated[
    str | None,
    option("--precision", metavar="NAME", help="fp32, tf32, bf16; default: bf16 on a GPU, else fp32", panel=_WHERE),
]


def reproduce(
    id: Id = None,
    listing: List = False,
    quick: Quick = False,
    seeds: Seeds = None,
    methods: Methods = None,
    where: Where = None,
    variants: Variants = False,
    show: Show = False,
    queue: Next = False,
    minutes: Minutes = None,
    results: Results = None,
    work: Work = Path("runs/reproduce"),
    data_dir: DataDir = None,
    device: Device = "auto",
    precision: Precision = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Play a paper's experiment and print its numbers beside ours.

    `fednorm reproduce fixbn.norms --quick` takes minutes, `fednorm reproduce fixbn.norms --show` plays nothing, and
    `fednorm reproduce --next --minutes 25` goes on with what is missing. What was stopped goes on where it was. Several
    may play at once in one --work folder, on as many GPUs or on one that each leaves idle at times.
    """
    if sum((id is not None, listing, queue)) != 1:
        raise ConfigError("give one of: an experiment such as fixbn.norms, --list, or --next")
    if minutes is not None and not 0 < minutes < 1e6:
        raise ConfigError(f"--minutes {minutes} is out of range; give a number above 0 and below 1,000,000")
    chosen = {"--quick": quick, "--seeds": seeds, "--methods": methods, "--where": " ".join(where or []) or None}
    chosen |= {"--variants": variants, "--show": show}
    if id is None:
        _refuse_for("--next" if queue else "--list", chosen)
    if not queue:
        _refuse_for(f"'{id}'" if id else "--list", {"--minutes": minutes})
    if quick and results is not None:
        raise ConfigError(
            f"--results {results} is for the papers' settings, and a quick run is not one; leave it out, "
            "quick-results in the folder of --work keeps what quick runs give"
        )
    if data_dir is not None and not Path(data_dir).is_dir():
        raise ConfigError(f"--data-dir {data_dir} is no folder; give the folder in which the data sets are")
    if results is not None and (listing or show) and not results.is_dir():
        raise ConfigError(f"--results {results} is no folder; give the folder in which the results are")
    from fednorm.engines.machine import find_device
    from fednorm.studies.library import PRECISIONS, Library
    from fednorm.studies.playing import Place

    if precision not in (None, *PRECISIONS):
        raise ConfigError(f"--precision {precision} is not known; give fp32, tf32 or bf16")
    find_device(device)  # refused also where nothing is played
    # What a quick run gives must never be taken for a result.
    folder = work / "quick-results" if quick else Path("studies/results") if results is None else results
    place = Place(Library(folder), work, device, precision, data_dir)
    if listing:
        _print_list(place, json)
    elif queue:
        _play_next(place, minutes, quiet, json)
    else:
        from fednorm.studies.measured import measured
        from fednorm.studies.study import all_studies, find_study

        study = find_study(str(id))
        of_seeds = (0,) if quick else study.recipe.seeds
        chosen_seeds = of_seeds if seeds is None else tuple(dict.fromkeys(read_seeds(seeds, 0)))
        named = [] if methods is None else methods.replace(" ", "").split(",")
        settings = _read_where(where or [])
        readings = variants or "variant" in settings
        cells = study.cells(quick=quick, methods=named, where=settings, variants=readings)

        def found() -> list[Measured]:
            return measured(cells, place.library, chosen_seeds, precision)

        if not show:
            from fednorm.studies.client_statistics import looks_of
            from fednorm.studies.playing import play_runs, wanted_runs
            from fednorm.studies.queue import with_data

            runs = [run for run in wanted_runs(cells, chosen_seeds) if not place.has(*run)]
            runs = with_data(runs, place, lambda text: echo(text, file=sys.stderr))
            _say_what_is_played(study, runs, quick, progress_stream(quiet, json))
            _warn_of_time(study, place, runs, quick)
            try:
                with _stops():
                    play_runs(runs, place, _watched(quiet, json), looks=looks_of(all_studies()))
            except DivergedError:  # of one run, which is no reason to keep the others' numbers back
                _print_study(study, found(), quick, json, work)
                raise
        _print_study(study, found(), quick, json, work)


def _read_where(texts: Sequence[str]) -> dict[str, list[str]]:
    """Settings to play: the values that were given for each axis.

    >>> _read_where(["momentum=local", "momentum=global", "local_steps=100"])
    {'momentum': ['local', 'global'], 'local_steps': ['100']}
    """
    found: dict[str, list[str]] = {}
    for text in texts:
        axis, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            raise ConfigError(f"--where {text} has no value; write --where AXIS=VALUE, such as --where momentum=local")
        found.setdefault(axis, []).append(value)
    return found


def _refuse_for(what: str, given: Mapping[str, object]) -> None:
    """Refuse options that would be ignored."""
    for name, value in given.items():
        if value not in (None, False):
            raise ConfigError(f"{name} has no meaning with {what}; leave it out (see `fednorm reproduce --help`)")


def _print_list(place: Place, json: bool) -> None:
    from fednorm.studies.queue import HOLD, is_here, longest_seconds, minutes_for, standing, too_long_text
    from fednorm.studies.study import all_studies

    found = [standing(study, place.library, place.precision) for study in all_studies()]
    here = {name: is_here(name, place.data_dir) for name in {name for each in found for name in each.study.data}}
    longest = {each.study.id: longest_seconds(each.study, place.has) for each in found}
    too_long = {id: seconds for id, seconds in longest.items() if seconds >= 60 * HOLD}
    rows = [
        {
            "id": each.study.id,
            "state": each.state,
            "cells": each.cells,
            "cells_done": each.done,
            "where": each.study.experiment.where,
            "about": each.study.recipe.about,
            "data": ", ".join(each.study.data),
            "data_here": all(here[name] for name in each.study.data),
            "needs_minutes": minutes_for(longest[each.study.id]) if each.study.id in too_long else None,
        }
        for each in found
    ]
    if json:
        print_json(rows)
        return
    print_table(
        ["experiment", "state", "cells", "data", "what it asks"],
        [
            [
                row["id"],
                row["state"],
                f"{row['cells_done']}/{row['cells']}",
                ", ".join(name + ("" if here[name] else " (not here)") for name in each.study.data),
                row["about"],
            ]
            for row, each in zip(rows, found, strict=True)
        ],
        numbers=["cells"],
        spare=["data"],
    )
    echo()
    say("in the order in which `fednorm reproduce --next` plays them; `fednorm reproduce ID --quick` needs no data")
    if too_long:
        say(f"by estimates for a GPU, {too_long_text(too_long, HOLD)}")
    say(f"states are those of the results in {place.library.folder}")


def _play_next(place: Place, minutes: float | None, quiet: bool, json: bool) -> None:
    from fednorm.studies.queue import HOLD, play_next
    from fednorm.studies.study import all_studies

    told = sys.stderr if json else sys.stdout
    with _stops():
        watched = _watched(quiet, json)
        played = play_next(all_studies(), place, minutes or HOLD, watched, lambda text: echo(text, told, flush=True))
    if json:
        print_json({"played": played, "results": str(place.library.folder)})
    else:
        echo(f"{played} runs played; results in {place.library.folder}")


def _say_what_is_played(study: Study, runs: list[tuple[RunConfig, int]], quick: bool, stream: TextIO | None) -> None:
    if runs and stream is not None:
        what = ", ".join(dict.fromkeys(f"{config.model} on {config.data.name}" for config, _ in runs))
        label = "; a quick run, not the paper's setting" if quick else ""
        count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
        echo(f"{study.id}: {count} to play, {what}{label}", stream, flush=True)


def _warn_of_time(study: Study, place: Place, runs: list[tuple[RunConfig, int]], quick: bool) -> None:
    """Say so where a GPU's work is about to be done without one: a step of the first run is timed."""
    if runs and not place.on_gpu and not quick:
        from fednorm.cli.dry import duration
        from fednorm.running.comparison import usable_jobs
        from fednorm.studies.estimate import seconds_of
        from fednorm.views.preview import estimate

        supposed = [seconds_of(config, 1, on_gpu=False) for config, _ in runs]
        measured = estimate(place.cell(place.settled(*runs[0])).plan())["seconds"]
        seconds = sum(supposed) * measured / supposed[0] / usable_jobs(len(runs))
        echo(f"{study.id}: about {duration(seconds)} without a GPU; a small version: --quick", file=sys.stderr)


def _watched(quiet: bool, json: bool) -> Watched:
    """Progress of runs."""
    from fednorm.running.observers import watching

    stream = progress_stream(quiet, json)
    return lambda cells: watching(cells[0].config.rounds, stream=stream, runs=len(cells))


@contextmanager
def _stops() -> Iterator[None]:
    """A word on how to go on after a signal."""
    from fednorm.running.stopping import Interrupted

    try:
        yield
    except Interrupted as stop:
        raise Stopped("stopped; the same command goes on from here", stop.exit_code) from None


def _print_study(study: Study, results: Sequence[Measured], quick: bool, json: bool, work: Path) -> None:
    from fednorm.studies.beside import COLUMNS, NUMBERS, OF_PAPER, sentences, table_rows, to_json
    from fednorm.studies.figures import picture_text

    if json:
        print_json(to_json(study, results, quick))
        return
    picture = picture_text(study, results, work, quick=quick)  # first: where it cannot be written, that is all there is
    say(f"{study.id}: {study.recipe.about}", indent="")
    echo()
    shown = [number for number, name in enumerate(COLUMNS) if not (quick and name in OF_PAPER)]
    rows = [[row[number] for number in shown] for row in table_rows(results)]
    print_table([COLUMNS[number] for number in shown], rows, numbers=NUMBERS, spare=["seeds", "best round"])
    echo()
    for text in sentences(study, results, quick):
        say(text)
    say(picture)
