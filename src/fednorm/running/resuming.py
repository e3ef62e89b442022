"""`resume`: a folder of a run or of a comparison goes on where it stopped, or further than it was meant to."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import nn

from fednorm.core.method import Method
from fednorm.core.task import AnyTask
from fednorm.data.federation import Federation
from fednorm.data.given import Examples
from fednorm.engines.machine import refuse_ranks
from fednorm.errors import CheckpointError, visible
from fednorm.running.api import resume_folder
from fednorm.running.cells import config_of
from fednorm.running.comparison import cells_of, play_comparison
from fednorm.running.config import updated
from fednorm.running.folder import RunFolder
from fednorm.running.given import Objects, check_given, config_in, gathered, read_config, read_stored
from fednorm.running.longer import Lengthening, lengthening, refuse_unless_wanted, set_rounds
from fednorm.running.plan import Plan
from fednorm.running.records import OnRow, RunId, RunResult
from fednorm.running.result_file import read_result_file
from fednorm.running.results import Result
from fednorm.running.trained import Trained


def resume(
    folder: str | Path,
    *,
    method: Method | Sequence[Method] | None = None,
    model: nn.Module | None = None,
    task: AnyTask | None = None,
    clients: Sequence[Examples] | None = None,
    test: Sequence[Examples] | Examples | None = None,
    federation: Federation | None = None,
    rounds: int | None = None,
    reschedule: bool = False,
    jobs: int = 1,
    on_row: OnRow | None = None,
    use: Sequence[str] = (),
    allow_code: bool = False,
) -> Result:
    """Go on where a folder stopped; what comes out equals an uninterrupted run to the bit.

    A run that was started with objects is given the same ones again. `rounds` trains it on to a larger number; where
    rounds that were played depend on the number it had (a cosine schedule, FixBN's half-way), it is refused unless
    `reschedule`. The folder may have come from anywhere: code that its config names runs with `allow_code`, or where
    `use` names it too.
    """
    run = RunFolder(Path(folder))
    methods = [] if method is None else [method] if isinstance(method, Method) else list(method)
    stored = read_stored(run)
    is_comparison = "compare" in stored
    alone = None if is_comparison else next(iter(methods), None)
    objects = gathered(model, clients, test, federation, alone, task or config_in(stored).task)
    named = {each.name: each for each in methods}
    if rounds is not None:
        refuse_ranks("a run of another length")
        _lengthen(run, rounds, reschedule, objects, named, use, allow_code)
    if is_comparison:
        cells = cells_of(run, objects=objects, methods=named, use=use, allow_code=allow_code)
        return play_comparison(run, cells, jobs=jobs, on_row=on_row)
    return resume_folder(run, objects=objects, on_row=on_row, use=use, allow_code=allow_code)


def _lengthen(
    run: RunFolder,
    rounds: int,
    reschedule: bool,
    objects: Objects,
    methods: dict[str, Method],
    use: Sequence[str],
    allow_code: bool,
) -> None:
    """Give a run, or all runs of a comparison, more rounds; nothing is changed where one of them cannot have them."""
    stored = read_stored(run)
    if "compare" in stored:
        cells = cells_of(run, objects=objects, methods=methods, use=use, allow_code=allow_code)
    else:
        check_given(run, stored, objects)
        cells = []
    config, _ = read_config(run, use=use, allow_code=allow_code)
    parts = [(cell.folder, cell.config, cell.objects) for cell in cells] or [(run, config, objects.trusting(config))]
    found = []
    with run.locked():
        for folder, each, own in parts:
            if folder.config.exists():
                longer = lengthening(folder, own.plan(updated(each, {"rounds": rounds})), own, rounds)
                found += [longer] if longer else []
        refuse_unless_wanted(found, reschedule)
        if cells:
            run.result.unlink(missing_ok=True)
            set_rounds(run, rounds)
        for longer in found:
            _write(longer, run)
    for note in dict.fromkeys(longer.note for longer in found if longer.reasons):
        print(visible(f"note: {note}"), file=sys.stderr)


def _write(longer: Lengthening, held: RunFolder) -> None:
    if longer.folder.path == held.path:
        longer.write()
        return
    with longer.folder.locked():
        longer.write()


def load_result(
    folder: str | Path,
    objects: Objects | None = None,
    methods: Mapping[str, Method] | None = None,
    *,
    use: Sequence[str] = (),
    allow_code: bool = False,
) -> Result:
    """The result in a folder; its models are made when they are asked for, which may need objects or consent."""
    run = RunFolder(Path(folder))
    objects, methods = objects or Objects(), methods or {}
    is_comparison = "compare" in read_stored(run)
    if not run.result.exists():
        raise CheckpointError(f"'{run.path}' has no result yet; `fednorm resume {run.path}` brings it to its end")

    def plan(id: RunId) -> Plan:
        stored = read_stored(run)
        check_given(run, stored, objects, methods)
        config, _ = read_config(run, allow_code=allow_code, use=use)
        own = config_of(config, id, methods) if is_comparison else config
        return replace(objects, method=methods.get(id.method)).trusting(config).plan(own)

    def trained(each: RunResult) -> Trained:
        id = RunId(each["method"], each["seed"])
        own = RunFolder(run.path / id.file_name) if is_comparison else run
        return Trained(partial(plan, id), own.state)

    runs = tuple(read_result_file(run)["runs"])
    return Result(runs, str(run.path), tuple(map(trained, runs)))
