"""The runs that a comparison consists of, each with a folder of its own, and how some are played in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from fednorm.core.method import Method
from fednorm.errors import CheckpointError
from fednorm.files import refuse_links
from fednorm.running.api import opened, play_all
from fednorm.running.config import RunConfig, updated
from fednorm.running.folder import RunFolder
from fednorm.running.given import Objects, check_stored, config_in, stored_config
from fednorm.running.plan import Plan
from fednorm.running.records import OnRow, RunId, RunResult
from fednorm.running.result_file import is_sealed, read_result_file, result_of
from fednorm.running.same_program import shares_stack


@dataclass(frozen=True)
class Cell:
    """One run of a comparison."""

    id: RunId
    folder: RunFolder
    config: RunConfig
    objects: Objects

    def plan(self) -> Plan:
        return self.objects.plan(self.config)

    def begin(self, given_data: Any = None) -> None:
        """Make its folder, or see that the one there is its own; `given_data` are digests of data that were objects."""
        refuse_links(self.folder.path)
        expected = stored_config(self.config, self.objects, given_data)
        if not self.folder.config.exists():
            self.folder.create(expected)
        check_stored(self.folder, expected)  # it may have come from elsewhere, and would be believed

    def result(self) -> RunResult:
        """What came out of it."""
        return result_of(self.folder, self.id, self.config)

    @property
    def is_done(self) -> bool:
        """Whether it was played to its end; one that was stopped early was not.

        A result without a digest is not believed: its run is taken up at its end, which computes it anew.
        """
        if not is_sealed(self.folder):
            return False
        told = read_result_file(self.folder)["runs"][0]["rounds_done"]
        return told == self.config.rounds and self.result()["rounds_done"] == told


def cells_in(stored: Mapping[str, Any], folder: RunFolder, objects: Objects, named: Mapping[str, Method]) -> list[Cell]:
    """The runs of a comparison, as its config.json names them."""
    if "compare" not in stored:
        raise CheckpointError(f"'{folder.config}' is not the config of a comparison")
    base = config_in(stored)
    ids = [RunId(method, seed) for seed in stored["compare"]["seeds"] for method in stored["compare"]["methods"]]
    return [
        Cell(
            id,
            RunFolder(folder.path / id.file_name),
            config_of(base, id, named),
            replace(objects, method=named.get(id.method)),
        )
        for id in ids
    ]


def config_of(base: RunConfig, id: RunId, named: Mapping[str, Method]) -> RunConfig:
    """The config of one run of a comparison; a method by name has its strategy there, one that is an object has not."""
    config = updated(base, id._asdict())
    return config if id.method in named else replace(config, clock=replace(config.clock, strategy=None))


def packs(pending: Sequence[Cell]) -> list[list[Cell]]:
    """Cells to be played in step, since they seem to be the same program on a device where that is worth it."""

    def in_step(together: Sequence[Cell], cell: Cell) -> bool:
        by_name = not (together[0].objects.method or cell.objects.method)
        return by_name and shares_stack(together[0].config, cell.config)

    return grouped(pending, in_step)


def grouped(cells: Iterable[Cell], joins: Callable[[Sequence[Cell], Cell], bool]) -> list[list[Cell]]:
    """Cells in groups: each goes to the first one that it joins, or begins another."""
    found: list[list[Cell]] = []
    for cell in cells:
        group = next((together for together in found if joins(together, cell)), None)
        if group is None:
            found.append([cell])
        else:
            group.append(cell)
    return found


def play_cells(cells: Sequence[Cell], on_row: OnRow | None) -> None:
    """Play some runs in step, each in its folder."""
    with ExitStack() as held:
        play_all([held.enter_context(opened(cell.folder, cell.plan(), on_row=on_row)) for cell in cells])
