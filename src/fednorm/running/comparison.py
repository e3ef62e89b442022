"""Several runs side by side: every method with every seed, one folder each.

They are played one after the other, in processes, or on a GPU those that are the same program in one stack.
"""

from __future__ import annotations

import multiprocessing
import os
import queue as queues
import shutil
import signal
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch import nn

from fednorm.core.method import Method
from fednorm.data.federation import Examples, Federation
from fednorm.engines.machine import refuse_ranks
from fednorm.engines.worker_messages import CannotSend, load, pack
from fednorm.errors import CheckpointError, ConfigError, FednormError, first_line
from fednorm.files import read_json, write_json
from fednorm.methods import parse
from fednorm.running.api import opened, play_all, settled
from fednorm.running.config import RunConfig, updated
from fednorm.running.extensions import warn_of_changes, with_extensions
from fednorm.running.folder import RunFolder
from fednorm.running.given import (
    Objects,
    check_given,
    check_stored,
    config_in,
    gathered,
    read_config,
    read_stored,
    stored_config,
)
from fednorm.running.plan import Plan
from fednorm.running.records import OnRow, RoundRow, RunId, RunResult, read_result
from fednorm.running.results import Result
from fednorm.running.same_program import shares_stack
from fednorm.running.stopping import Interrupted, Stop, orderly_stop
from fednorm.running.trained import Trained


@dataclass(frozen=True)
class Cell:
    """One run of a comparison."""

    id: RunId
    folder: RunFolder
    config: RunConfig
    objects: Objects

    def plan(self) -> Plan:
        return self.objects.plan(self.config)


def compare(
    methods: Sequence[str | Method],
    config: RunConfig | None = None,
    *,
    model: nn.Module | str | None = None,
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
    was. `jobs` processes work at a time, on one CPU thread each. Without `out` all is gone with the result.
    """
    refuse_ranks("a comparison")
    objects = gathered(model, clients, test, federation)
    config = settled(config, objects, model, use, settings)
    if jobs > 1:
        config = updated(config, {"engine.threads": 1})
    methods = [methods] if isinstance(methods, str | Method) else methods
    named = {each.name: each for each in methods if isinstance(each, Method)}
    names = _distinct([parse(method).name for method in methods], "method")
    wanted = comparison_config(config, names, _distinct(seeds, "seed"), _all_given(objects, named))
    folder = RunFolder(Path(tempfile.mkdtemp(prefix="fednorm-") if out is None else out))
    try:
        cells = _cells(wanted, folder, objects, named)
        if not (resume and folder.config.exists()):
            for cell in cells:  # everything that can be refused is refused before anything is written
                if cell.id.seed == seeds[0]:
                    cell.plan()
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


def comparison_config(config: RunConfig, methods: Sequence[str], seeds: Sequence[int], given: list[str]) -> Any:
    """What config.json of a comparison holds."""
    stored = stored_config(config, Objects())
    return {"compare": {"methods": list(methods), "seeds": list(seeds)}, **stored, "given": given}


def resume_comparison(
    folder: RunFolder,
    *,
    jobs: int = 1,
    on_row: OnRow | None = None,
    objects: Objects | None = None,
    methods: Mapping[str, Method] | None = None,
    allow_code: bool = False,
    use: Sequence[str] = (),
) -> Result:
    """Play what is left of a comparison and write its joint result."""
    cells = cells_of(folder, objects=objects, methods=methods, allow_code=allow_code, use=use)
    return play_comparison(folder, cells, jobs=jobs, on_row=on_row)


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
    check_given(folder, stored, _all_given(objects, methods))
    with_extensions(config)
    return _cells(stored, folder, objects, methods)


def play_comparison(folder: RunFolder, cells: Sequence[Cell], *, jobs: int, on_row: OnRow | None) -> Result:
    """Play what is left of some runs and write their joint result."""
    with folder.locked():
        for cell in cells:
            expected = stored_config(cell.config, cell.objects)
            if not cell.folder.config.exists():
                cell.folder.create(expected)
            check_stored(cell.folder, expected)  # it may have come from elsewhere, and would be believed
        pending = [cell for cell in cells if not _is_done(cell)]
        if jobs > 1 and len(pending) > 1:
            _play_in_processes(pending, jobs, on_row)
        else:
            for cells_together in _packs(pending):
                _play(cells_together, on_row)
        result = result_of(folder, cells)
        write_json(folder.result, result.to_json())
    return result


def result_of(folder: RunFolder, cells: Sequence[Cell]) -> Result:
    """What came out of a comparison whose runs have ended, with its models in reach."""
    trained = tuple(Trained(cell.plan, cell.folder.state) for cell in cells)
    return Result(tuple(map(_result_of, cells)), str(folder.path), trained)


def _all_given(objects: Objects, methods: Mapping[str, Method]) -> list[str]:
    return [*objects.names, *(["method"] if methods else [])]


def _is_done(cell: Cell) -> bool:
    return cell.folder.result.exists() and _result_of(cell)["rounds_done"] == cell.config.rounds


def _result_of(cell: Cell) -> RunResult:
    path = cell.folder.result
    return read_result(read_json(path), f"'{path}'")["runs"][0]


def _distinct(values: Sequence[Any], what: str) -> list[Any]:
    if not values:
        raise ConfigError(f"nothing to compare; give at least one {what}")
    for value in values:
        if list(values).count(value) > 1:
            raise ConfigError(f"{what} '{value}' is given twice; name each once")
    return list(values)


def _cells(stored: Mapping[str, Any], folder: RunFolder, objects: Objects, named: Mapping[str, Method]) -> list[Cell]:
    if "compare" not in stored:
        raise CheckpointError(f"'{folder.config}' is not the config of a comparison")
    base = config_in(stored)
    ids = [RunId(method, seed) for seed in stored["compare"]["seeds"] for method in stored["compare"]["methods"]]
    return [
        Cell(
            id,
            RunFolder(folder.path / id.file_name),
            updated(base, id._asdict()),
            replace(objects, method=named.get(id.method)),
        )
        for id in ids
    ]


def _packs(pending: Sequence[Cell]) -> list[list[Cell]]:
    """Cells to be played in step, since they seem to be the same program on a device where that is worth it."""
    packs: list[list[Cell]] = []
    for cell in pending:
        for together in packs:
            by_name = not (together[0].objects.method or cell.objects.method)
            if by_name and shares_stack(together[0].config, cell.config):
                together.append(cell)
                break
        else:
            packs.append([cell])
    return packs


def _play(cells: Sequence[Cell], on_row: OnRow | None) -> None:
    with ExitStack() as held:
        play_all([held.enter_context(opened(cell.folder, cell.plan(), on_row=on_row)) for cell in cells])


def _work(cell: Cell, packed: bytes, told: Any, enough: Any) -> None:
    """A worker process: play one run, tell its rows, and tell how it ended."""

    def tell(run: RunId, row: RoundRow) -> None:
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            raise Interrupted(signal.SIGTERM)  # killed: nobody would read on, and whoever resumes wants the folder
        told.put((run, row))
        if enough.is_set():
            raise Stop

    try:
        _play([replace(cell, objects=_unpacked(packed))], tell)
    except FednormError as error:
        told.put((cell.id, error))
    except Interrupted:
        pass


def _unpacked(packed: bytes) -> Objects:
    try:
        return load(packed)
    except Exception as error:  # a class that another process does not find
        raise ConfigError(
            f"what was given cannot be rebuilt in another process ({first_line(error)}); "
            "define it in a module of its own, or use jobs=1"
        ) from None


def _packed(objects: Objects) -> bytes:
    try:
        return pack(objects, f"the given {', '.join(objects.names)}")
    except CannotSend as refusal:
        raise ConfigError(f"{refusal}; define it at the top of a module, or use jobs=1") from None


def _tell(on_row: OnRow, run: RunId, row: RoundRow, enough: Any) -> None:
    """Tell who watches of another process's round; if they want it to be the last, that process hears of it."""
    try:
        on_row(run, row)
    except Stop:
        enough.set()


def _play_in_processes(pending: Sequence[Cell], jobs: int, on_row: OnRow | None) -> None:
    # Fresh interpreters: a fork of a process that has used torch's threads may hang.
    context = multiprocessing.get_context("spawn")
    resource_tracker.ensure_running()  # whose start would undo the block of signals below
    told = context.Queue()
    waiting = [(cell, _packed(cell.objects)) for cell in pending]
    enough = {cell.id: context.Event() for cell in pending}
    working: dict[BaseProcess, Cell] = {}
    asked_to_end: set[BaseProcess] = set()
    failure: FednormError | None = None
    with orderly_stop() as stopped:
        while waiting or working:
            while waiting and len(working) < jobs and not stopped() and failure is None:
                cell, packed = waiting.pop(0)
                bare = replace(cell, objects=Objects())
                process = context.Process(target=_work, args=(bare, packed, told, enough[cell.id]))
                # A worker inherits the block: Ctrl-C in a terminal reaches this process alone, which ends the others.
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                process.start()
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
                working[process] = cell
            try:
                run, news = told.get(timeout=0.2)
                if isinstance(news, FednormError):
                    failure = failure or news
                elif on_row and not enough[run].is_set():
                    _tell(on_row, run, news, enough[run])
            except queues.Empty:
                pass
            if stopped() or failure:
                waiting.clear()
                for process in working.keys() - asked_to_end:
                    process.terminate()
                    asked_to_end.add(process)  # asked twice, a worker would not finish its round
            for process in [process for process in working if not process.is_alive()]:
                cell = working.pop(process)
                process.join()
                if process.exitcode and not stopped() and failure is None:
                    failure = FednormError(
                        f"the process of {cell.id.method}, seed {cell.id.seed}, ended with {process.exitcode}"
                    )
        if stopped():
            raise Interrupted(stopped())
    if failure:
        raise failure


def usable_jobs(limit: int) -> int:
    """At most `limit` processes, and no more than there are cores."""
    return max(1, min(limit, os.cpu_count() or 1))
