"""Several runs side by side: every method with every seed, one folder each.

They are played one after the other, in processes, or on a GPU those that are the same program in one stack.
"""

from __future__ import annotations

import multiprocessing
import os
import queue as queues
import signal
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from fednorm.engines.machine import find_device, refuse_ranks
from fednorm.errors import CheckpointError, ConfigError, FednormError
from fednorm.files import read_json, write_json
from fednorm.methods import parse
from fednorm.running.api import Interrupted, Objects, opened, orderly_stop, play_all, stored_config
from fednorm.running.config import RunConfig, from_dict, to_dict, updated
from fednorm.running.folder import RunFolder
from fednorm.running.plan import make_plan
from fednorm.running.records import OnRow, RoundRow, RunId, RunResult, read_result
from fednorm.running.results import Result
from fednorm.running.same_program import shares_stack
from fednorm.running.trial import try_out


@dataclass(frozen=True)
class Cell:
    """One run of a comparison."""

    id: RunId
    folder: RunFolder
    config: RunConfig


def compare(
    methods: Sequence[str],
    *,
    config: RunConfig | None = None,
    seeds: Sequence[int] = (0,),
    out: str | Path,
    jobs: int = 1,
    on_row: OnRow | None = None,
) -> Result:
    """Run every method with every seed on the same data and model, and return all results.

    `jobs` processes work at a time. On a CPU each run has one thread unless `engine.threads` says more, so that what
    comes out does not depend on `jobs`.
    """
    config, names = settled(methods, config or RunConfig(), seeds, jobs)
    folder = RunFolder(Path(out))
    folder.refuse_place()
    wanted = {"compare": {"methods": names, "seeds": list(seeds)}, **to_dict(config)}
    for cell in _cells(wanted, folder):  # everything that can be refused is refused before anything is written
        if cell.id.seed == seeds[0]:
            try_out(make_plan(cell.config))
    folder.create(wanted)
    return resume_comparison(folder, jobs=jobs, on_row=on_row)


def settled(methods: Sequence[str], config: RunConfig, seeds: Sequence[int], jobs: int) -> tuple[RunConfig, list[str]]:
    """The config of a comparison's runs and the names of its methods, or a refusal of what cannot be compared."""
    refuse_ranks("a comparison")
    names = _distinct([parse(method).name for method in methods], "method")
    _distinct(seeds, "seed")
    # The engine `auto` has one thread anyway, and may take other cores for workers where it was not given one.
    alone = jobs == 1 and (config.engine.name == "auto" or find_device(config.engine.device).type != "cpu")
    threads = config.engine.threads or (0 if alone else 1)
    return updated(config, {"engine.threads": threads}), names


def resume_comparison(folder: RunFolder, *, jobs: int = 1, on_row: OnRow | None = None) -> Result:
    """Play what is left of a comparison and write its joint result."""
    refuse_ranks("a comparison")
    stored = read_json(folder.config)
    with folder.locked():
        cells = _cells(stored, folder)
        for cell in cells:
            if not cell.folder.config.exists():
                cell.folder.create(stored_config(cell.config, Objects()))
        pending = [cell for cell in cells if not cell.folder.result.exists()]
        if jobs > 1 and len(pending) > 1:
            _play_in_processes(pending, jobs, on_row)
        else:
            for cells_together in _packs(pending):
                _play(cells_together, on_row)
        result = Result(tuple(_result_of(cell) for cell in cells), str(folder.path))
        write_json(folder.result, result.to_json())
    return result


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


def _cells(stored: Mapping[str, Any], folder: RunFolder) -> list[Cell]:
    try:
        methods, seeds = stored["compare"]["methods"], stored["compare"]["seeds"]
    except (KeyError, TypeError):
        raise CheckpointError(f"'{folder.config}' is not the config of a comparison") from None
    base = from_dict({key: value for key, value in stored.items() if key != "compare"})
    ids = [RunId(method, seed) for seed in seeds for method in methods]
    return [Cell(id, RunFolder(folder.path / id.file_name), updated(base, id._asdict())) for id in ids]


def _packs(pending: Sequence[Cell]) -> list[list[Cell]]:
    """Cells to be played in step, since they seem to be the same program on a device where that is worth it."""
    packs: list[list[Cell]] = []
    for cell in pending:
        for pack in packs:
            if shares_stack(pack[0].config, cell.config):
                pack.append(cell)
                break
        else:
            packs.append([cell])
    return packs


def _play(cells: Sequence[Cell], on_row: OnRow | None) -> None:
    with ExitStack() as held:
        play_all([held.enter_context(opened(cell.folder, on_row=on_row)) for cell in cells])


def _work(cell: Cell, told: Any) -> None:
    """A worker process: play one run, tell its rows, and tell how it ended."""

    def tell(run: RunId, row: RoundRow) -> None:
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            raise Interrupted(signal.SIGTERM)  # killed: nobody would read on, and whoever resumes wants the folder
        told.put((run, row))

    try:
        _play([cell], tell)
    except FednormError as error:
        error.add_note(f"in the process of {cell.id}:\n{traceback.format_exc()}")  # which does not come along
        told.put((cell.id, error))
    except Interrupted:
        pass


def _play_in_processes(pending: Sequence[Cell], jobs: int, on_row: OnRow | None) -> None:
    # Fresh interpreters: a fork of a process that has used torch's threads may hang.
    context = multiprocessing.get_context("spawn")
    resource_tracker.ensure_running()  # whose start would undo the block of signals below
    told = context.Queue()
    waiting = list(pending)
    working: dict[BaseProcess, Cell] = {}
    asked_to_end: set[BaseProcess] = set()
    failure: FednormError | None = None
    with orderly_stop() as stopped:
        while waiting or working:
            while waiting and len(working) < jobs and not stopped() and failure is None:
                cell = waiting.pop(0)
                process = context.Process(target=_work, args=(cell, told))
                # A worker inherits the block: Ctrl-C in a terminal reaches this process alone, which ends the others.
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                process.start()
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
                working[process] = cell
            try:
                run, news = told.get(timeout=0.2)
                if isinstance(news, FednormError):
                    failure = failure or news
                elif on_row:
                    on_row(run, news)
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
