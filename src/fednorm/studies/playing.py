"""Playing the runs that studies need: those that are the same program in one stack, each kept when it has ended."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from fednorm.data.federation import Federation
from fednorm.engines.machine import device_name, find_device
from fednorm.errors import DivergedError
from fednorm.files import make_writable, read_json
from fednorm.running.cells import Cell, grouped
from fednorm.running.comparison import play_pending, usable_jobs
from fednorm.running.config import RunConfig, to_dict, updated
from fednorm.running.folder import RunFolder
from fednorm.running.given import Objects
from fednorm.running.on_clock import names_strategy
from fednorm.running.records import OnRow, RoundRow, RunId
from fednorm.running.stopping import Stop
from fednorm.running.store import Store
from fednorm.studies.client_statistics import Look, client_statistics
from fednorm.studies.library import Diverged, DivergedRun, Library, Outcome, Record, key_of, make_record
from fednorm.studies.study import StudyCell

_PLACES = ("--results", "--work", "--data-dir")
"""Options that name folders."""
_TOLD = ("fednorm", "python", "torch", "commit", "gpu", "cpu_count", "started")
"""What a record keeps of where it was made: what may have a part in its numbers."""
Watched = Callable[[Sequence[Cell]], AbstractContextManager[OnRow]]
"""Who watches some runs while they are played."""


@dataclass(frozen=True)
class Place:
    """Where runs are played and what is found there."""

    library: Library
    work: Path
    """folder of the runs themselves: what is needed to go on with one that was stopped"""
    device: str = "auto"
    precision: str | None = None
    """numbers inside a GPU's convolutions and norms; None: bf16 on a GPU, fp32 elsewhere"""
    data_dir: str | None = None

    @cached_property
    def on_gpu(self) -> bool:
        return find_device(self.device).type == "cuda"

    @property
    def numbers(self) -> str:
        """The precision in which runs are played here."""
        return self.precision or ("bf16" if self.on_gpu else "fp32")

    def has(self, config: RunConfig, seed: int) -> bool:
        """Whether a run was played before, in the precision that was asked for.

        Where none was, that which is shown counts, and also that of this machine: it would give the same run again.
        """
        counted = {self.precision, self.numbers}
        return any(self.library.has(config, seed, precision) for precision in counted)

    def make_ready(self) -> None:
        """Make the folders, or refuse what cannot be written."""
        make_writable(self.library.folder)
        make_writable(self.work)

    def settled(self, config: RunConfig, seed: int) -> RunConfig:
        """A run's config on this machine."""
        here = {"engine.device": self.device, "engine.precision": self.numbers, "data.dir": self.data_dir}
        here |= {} if self.on_gpu else {"engine.threads": 1}  # each run has a process, and no bit depends on how many
        return updated(config, {**here, "seed": seed})

    def cell(self, config: RunConfig) -> Cell:
        """The run of a settled config, with its folder."""
        id = RunId(config.method, config.seed)
        name = f"{key_of(config)}-{id.file_name}-{config.engine.precision}"
        return Cell(id, RunFolder(self.work / name), config, Objects())


def wanted_runs(cells: Iterable[StudyCell], seeds: Sequence[int]) -> list[tuple[RunConfig, int]]:
    """The runs behind some cells, each once: all seeds of a config one after the other."""
    configs = {key_of(cell.config): cell.config for cell in cells}
    return [(config, seed) for config in configs.values() for seed in seeds]


def play_runs(
    runs: Iterable[tuple[RunConfig, int]],
    place: Place,
    watched: Watched,
    deadline: float = float("inf"),
    looks: Mapping[str, Look] | None = None,
) -> bool:
    """Play the runs that were not played before; whether all came to their end before the deadline.

    A run that did not is kept in its folder and goes on from there the next time. One on a clock that ended is in the
    library alone. One that diverged is kept as such, and told of when all others were played: it says nothing about
    them.
    """
    diverged: list[DivergedError] = []
    missing = [place.settled(config, seed) for config, seed in runs if not place.has(config, seed)]
    for together in _batches([place.cell(config) for config in missing]):
        for cell in {cell.id.method: cell for cell in reversed(together)}.values():
            cell.plan()  # what can be refused is refused before anything is written
        place.make_ready()
        for cell in together:
            cell.begin()
        pending, failed = [cell for cell in together if not cell.is_done], list[DivergedError]()
        try:
            if pending:
                with watched(pending) as tell:
                    failed = _play(pending, place, _until(deadline, tell))
        finally:  # what ended before a signal came is a result too
            done = [cell for cell in together if cell.is_done]
            for cell in done:
                _keep(cell, _kept(cell, (looks or {}).get(key_of(cell.config))), place.library)
        if len(done) + len(failed) < len(together):
            return False
        diverged += failed
    if diverged:
        raise diverged[0]
    return True


def _play(pending: Sequence[Cell], place: Place, tell: OnRow) -> list[DivergedError]:
    """Play runs until each has ended, was stopped or diverged; those that diverged are kept as soon as they have."""
    diverged: list[DivergedError] = []
    while pending:
        try:
            play_pending(pending, 1 if place.on_gpu else usable_jobs(len(pending)), tell)
            break
        except DivergedError as error:
            lost = next((cell for cell in pending if cell.id == error.run), None)
            if lost is None or error.round is None:
                raise
            _keep(lost, _kept_diverged(lost, error.round, str(error)), place.library)
            diverged.append(error)
            pending = [cell for cell in pending if cell is not lost and not cell.is_done]
    return diverged


def _batches(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Runs that can be told apart by method and seed, side by side."""

    def tellable(together: Sequence[Cell], cell: Cell) -> bool:
        return cell.config.rounds == together[0].config.rounds and cell.id not in [each.id for each in together]

    return grouped(cells, tellable)


def _until(deadline: float, tell: OnRow) -> OnRow:
    """An observer that ends every run after a moment."""

    def watch(run: RunId, row: RoundRow) -> None:
        tell(run, row)
        if time.monotonic() > deadline:
            raise Stop

    return watch


def _keep(cell: Cell, outcome: Outcome, library: Library) -> None:
    """Put what became of a run into the library."""
    library.save(outcome)
    if names_strategy(cell.config.method):
        # Its checkpoint holds a model for every client under way: a few runs of this kind would fill a disk.
        shutil.rmtree(cell.folder.path)


def _kept(cell: Cell, look: Look | None) -> Record:
    """What the library keeps of a run in its folder."""
    plan = cell.plan()
    with closing(Store(cell.folder.state)) as store:
        return make_record(
            _wherever(cell.config),
            cell.result(),
            store.rows(),
            domains_of_clients(plan.federation),
            _environment(cell),
            client_statistics(plan, store, look) if look else {},
        )


def _kept_diverged(cell: Cell, round: int, why: str) -> Diverged:
    """What the library keeps of a run that diverged."""
    device = cell.plan().device
    ran = {"precision": cell.config.engine.precision, "device": str(device), "device_name": device_name(device)}
    run: DivergedRun = {
        "method": cell.config.method,
        "seed": cell.config.seed,
        "diverged_in": round,
        "why": why,
        "ran": ran,
    }
    config = _wherever(cell.config)
    return Diverged(key_of(config), to_dict(config), run, _environment(cell))


def _wherever(config: RunConfig) -> RunConfig:
    """A config without the folder that data have on this machine."""
    return updated(config, {"data.dir": None})


def _environment(cell: Cell) -> dict[str, Any]:
    """Where a run was played, and by which command."""
    stored = read_json(cell.folder.path / "env.json")
    return {key: stored.get(key) for key in _TOLD} | {"command": plain_command(sys.argv[1:])}


def plain_command(arguments: Iterable[str]) -> str:
    """A command without the folders of the machine it was given on.

    >>> plain_command(["--next", "--minutes", "25", "--work", "/tmp/x"])
    'fednorm --next --minutes 25'
    """
    words = iter(arguments)
    kept = []
    for word in words:
        if word in _PLACES:
            next(words, None)
        elif not word.startswith(tuple(f"{option}=" for option in _PLACES)):
            kept.append(word)
    return shlex.join(["fednorm", *kept])


def domains_of_clients(federation: Federation) -> list[str]:
    """The domain that each client's own test rows lie in; empty where data have no domains."""
    rows = {name: set(tests.tolist()) for name, tests in federation.domains.items()}

    def domain(own: Tensor) -> str:
        return next((name for name, tests in rows.items() if tests.issuperset(own.tolist())), "")

    return [domain(own) for own in federation.own_test] if rows else []
