"""Runs of a comparison in processes of their own, some at a time."""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from fednorm.engines.worker_messages import CannotSend, load, pack
from fednorm.errors import ConfigError, FednormError, first_line
from fednorm.running.cells import Cell, play_cells
from fednorm.running.given import Objects
from fednorm.running.records import OnRow, RoundRow, RunId
from fednorm.running.stopping import Interrupted, Stop, orderly_stop


def _work(cell: Cell, packed: bytes, told: Connection, enough: Any) -> None:
    """A worker process: play one run, tell its rows, and tell how it ended."""

    def tell(run: RunId, row: RoundRow) -> None:
        try:
            told.send((run, row))
        except ConnectionError:  # nobody reads on: the parent is gone, and whoever resumes wants the folder
            raise Interrupted(signal.SIGTERM) from None
        if enough.is_set():
            raise Stop

    try:
        play_cells([replace(cell, objects=_unpacked(packed))], tell)
    except FednormError as error:
        error.add_note(f"in the process of {cell.id}:\n{traceback.format_exc()}")  # which does not come along
        with suppress(ConnectionError):
            told.send((cell.id, error))
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


def refuse_unsendable(cells: Sequence[Cell]) -> None:
    """Refuse objects that cannot go to another process, before anything is written."""
    for cell in cells:
        _packed(cell.objects)


def _tell(on_row: OnRow, run: RunId, row: RoundRow, enough: Any) -> None:
    """Tell who watches of another process's round; if they want it to be the last, that process hears of it."""
    try:
        on_row(run, row)
    except Stop:
        enough.set()


def _news(told: dict[BaseProcess, Connection]) -> Iterator[tuple[RunId, RoundRow | FednormError]]:
    """What processes have said by now, or say in a moment; lines that ended are forgotten."""
    ready = wait(list(told.values()), timeout=0.2)
    if not told:
        time.sleep(0.05)  # for processes that have said all there is, to end
    for process, line in list(told.items()):
        if line in ready:
            try:
                yield line.recv()
            except (EOFError, OSError):  # it ended, or was killed
                line.close()
                del told[process]


def play_in_processes(pending: Sequence[Cell], jobs: int, on_row: OnRow | None) -> None:
    """Play runs in processes, `jobs` at a time; the first failure ends all of them."""
    # Fresh interpreters: a fork of a process that has used torch's threads may hang.
    context = multiprocessing.get_context("spawn")
    resource_tracker.ensure_running()  # whose start would undo the block of signals below
    waiting = [(cell, _packed(cell.objects)) for cell in pending]
    enough = {cell.id: context.Event() for cell in pending}
    working: dict[BaseProcess, Cell] = {}
    told: dict[BaseProcess, Connection] = {}
    """a line from each: one that is killed in the middle of a word leaves the others theirs"""
    asked_to_end: set[BaseProcess] = set()
    failure: FednormError | None = None
    with orderly_stop() as stopped:
        while waiting or working:
            while waiting and len(working) < jobs and not stopped() and failure is None:
                cell, packed = waiting.pop(0)
                bare = replace(cell, objects=Objects())
                heard, says = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(bare, packed, says, enough[cell.id]))
                # A worker inherits the block: Ctrl-C in a terminal reaches this process alone, which ends the others.
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                process.start()
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
                says.close()  # the process has its own end: when it is gone, so is the line
                working[process], told[process] = cell, heard
            for run, news in _news(told):
                if isinstance(news, FednormError):
                    news.run = run
                    failure = failure or news
                elif on_row and not enough[run].is_set():
                    _tell(on_row, run, news, enough[run])
            if stopped() or failure:
                waiting.clear()
                for process in working.keys() - asked_to_end:
                    process.terminate()
                    asked_to_end.add(process)  # asked twice, a worker would not finish its round
            for process in [process for process in working if process not in told and not process.is_alive()]:
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
