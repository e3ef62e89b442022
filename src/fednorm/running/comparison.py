"""Several runs side by side: every method with every seed, one folder each.

They are played one after the other, in processes, or on a GPU those that are the same program in one stack.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from fednorm.core.method import Method
from fednorm.core.task import AnyTask
from fednorm.data.federation import Federation
from fednorm.data.given import Examples
from fednorm.engines.machine import find_device, refuse_ranks
from fednorm.errors import ConfigError, FednormError
from fednorm.running.api import described
from fednorm.running.cells import Cell, cells_in, packs, play_cells
from fednorm.running.config import RunConfig, updated
from fednorm.running.extensions import warn_of_changes, with_extensions
from fednorm.running.folder import RunFolder
from fednorm.running.given import (
    Objects,
    check_given,
    check_stored,
    gathered,
    given_names,
    read_config,
    read_stored,
    stored_config,
)
from fednorm.running.in_processes import play_in_processes, refuse_unsendable
from fednorm.running.on_clock import on_one_clock
from fednorm.running.records import OnRow
from fednorm.running.result_file import write_result
from fednorm.running.results import Result
from fednorm.running.trained import Trained
from fednorm.running.trial import try_out


def compare(
    methods: Sequence[str | Method],
    config: RunConfig | None = None,
    *,
    model: nn.Module | str | None = None,
    task: str | AnyTask | None = None,
    clients: Sequence[Examples] | None = None,
    test: Sequence[Examples] | Examples | None = None,
    federation: Federation | None = None,
    seeds: Sequence[int] = (0,),
    out: str | Path | None = None,
    resume: bool = False,
    jobs: int = 1,
    on_row: OnRow | None = None,
    use: Sequence[str] = (),
    **settings: Any,
) -> Result:
    """Run every method with every seed on the same data and model, and return all results.

    All but `methods`, `seeds` and `jobs` is as in `run`; raising `fednorm.Stop` in `on_row` ends the run whose row it
    was. `jobs` processes work at a time. On a CPU each run has one thread unless `engine.threads` says more, so that
    what comes out does not depend on `jobs`. Without `out` all files are gone with the result.
    """
    config = described(config, {"model": model, "task": task}, use, settings)
    objects = gathered(model, clients, test, federation, None, task or config.task)
    methods = [methods] if isinstance(methods, str | Method) else methods
    named = {each.name: each for each in methods if isinstance(each, Method)}
    config, names = settled(methods, objects.named(config), seeds, jobs)
    objects = objects.trusting(config)
    given = {"given": given_names(objects, named)}
    wanted = {"compare": {"methods": names, "seeds": list(seeds)}, **stored_config(config, objects), **given}
    folder = RunFolder(Path(tempfile.mkdtemp(prefix="fednorm-") if out is None else out))
    try:
        cells = cells_in(wanted, folder, objects, named)
        if not (resume and folder.config.exists()):
            folder.refuse_place()
            for cell in cells:  # everything that can be refused is refused before anything is written
                if cell.id.seed == seeds[0]:
                    try_out(cell.plan(), objects.model)
            if jobs > 1:
                refuse_unsendable(cells)
            folder.create(wanted)
        check_stored(folder, wanted)
        warn_of_changes(read_stored(folder).get("use_sha256", {}))
        result = play_comparison(folder, cells, jobs=jobs, on_row=on_row)
    except BaseException:
        if out is None:
            shutil.rmtree(folder.path)
        raise
    if out is None:
        result = replace(result, folder=None)
        weakref.finalize(result, shutil.rmtree, folder.path, ignore_errors=True)
    return result


def settled(
    methods: Sequence[str | Method], config: RunConfig, seeds: Sequence[int], jobs: int
) -> tuple[RunConfig, list[str]]:
    """The config of a comparison's runs and the names of its methods, or a refusal of what cannot be compared."""
    refuse_ranks("a comparison")
    config = with_extensions(config)
    config, named = on_one_clock(methods, config)
    names = _distinct(named, "method")
    _distinct(seeds, "seed")
    # The engine `auto` has one thread anyway, and may take other cores for workers where it was not given one.
    alone = jobs == 1 and (config.engine.name == "auto" or find_device(config.engine.device).type != "cpu")
    threads = config.engine.threads or (0 if alone else 1)
    return updated(config, {"engine.threads": threads}), names


def cells_of(
    folder: RunFolder,
    *,
    objects: Objects | None = None,
    methods: Mapping[str, Method] | None = None,
    allow_code: bool = False,
    use: Sequence[str] = (),
) -> list[Cell]:
    """The runs of the comparison in a folder, with the objects it was started with."""
    refuse_ranks("a comparison")
    objects, methods = objects or Objects(), methods or {}
    stored = read_stored(folder)
    config, _ = read_config(folder, allow_code=allow_code, use=use)
    check_given(folder, stored, objects, methods)
    with_extensions(config)
    return cells_in(stored, folder, objects.trusting(config), methods)


def play_comparison(folder: RunFolder, cells: Sequence[Cell], *, jobs: int, on_row: OnRow | None) -> Result:
    """Play what is left of some runs and write their joint result."""
    data = read_stored(folder).get("given_data")  # whoever made the cells compared them
    with folder.locked():
        for cell in cells:
            cell.begin(data)
        play_pending([cell for cell in cells if not cell.is_done], jobs, on_row)
        trained = tuple(Trained(cell.plan, cell.folder.state) for cell in cells)
        result = Result(tuple(cell.result() for cell in cells), str(folder.path), trained)
        write_result(folder, result.to_json())
    return result


def play_pending(pending: Sequence[Cell], jobs: int, on_row: OnRow | None) -> None:
    """Play runs to their end: in processes, or here, those that share a stack together.

    An error says which of them it ended.
    """
    try:
        if jobs > 1 and len(pending) > 1:
            play_in_processes(pending, jobs, on_row)
            return
        for together in packs(pending):
            play_cells(together, on_row)
    except FednormError as error:
        if error.run is not None and len(pending) > 1:
            error.args = (f"{error.run}: {error}", *error.args[1:])
        raise


def _distinct(values: Sequence[Any], what: str) -> list[Any]:
    if not values:
        raise ConfigError(f"nothing to compare; give at least one {what}")
    for value in values:
        if list(values).count(value) > 1:
            raise ConfigError(f"{what} '{value}' is given twice; name each once")
    return list(values)


def usable_jobs(limit: int) -> int:
    """At most `limit` processes, and no more than there are cores."""
    return max(1, min(limit, os.cpu_count() or 1))
