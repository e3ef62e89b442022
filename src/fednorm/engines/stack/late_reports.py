"""What clients of rounds on the device reported, which is read when somebody looks at it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from math import isfinite
from typing import Any

from fednorm.core.report import LOSSES, Report
from fednorm.engines.base import Awaited
from fednorm.engines.stack.guard import NUM_MOVED, flaws_of_numbers, off_by_norms
from fednorm.engines.stack.health import FINE, NOT_FINITE
from fednorm.engines.stack.log_copy import LogCopy
from fednorm.engines.stack.messages import Assignment
from fednorm.engines.stack.phase_program import PhaseProgram
from fednorm.halves.site import Sites


class LateReports(Awaited):
    """Reports that are read from the device when somebody looks at them.

    A round of one step is over in a millisecond, and most are looked at for their mean loss alone: so that is taken
    from the numbers as they lie there, and reports are made of them only for who asks for one.
    """

    def __init__(self, program: PhaseProgram, slot: int, row: int, task: Assignment, sites: Sites) -> None:
        self._at = program, slot, row, sites
        self._log: LogCopy | None = None
        self._clients = task.clients
        self._columns: list[list[float]] | None = None
        """losses, measures, how far they moved and their health, of all clients each"""
        self._ready: list[Report] | None = None

    def send(self) -> None:
        """Let the reports come to the host, where they are read later."""
        self._log = self._log or self._at[0].log()

    def settle(self) -> list[list[float]]:
        """Read the numbers, now."""
        columns = self._columns
        if columns is None:
            program, slot, row, _ = self._at
            first = row * program.clients
            log = (self._log or program.log()).read()
            columns = self._columns = log[slot, :, first : first + program.clients].tolist()
        return columns

    def losses(self, name: str) -> list[tuple[int, float]]:
        examples = self._at[3].batches.num_examples
        return list(zip(map(examples, self._clients), self.settle()[LOSSES.index(name)], strict=True))

    def _reports(self) -> list[Report]:
        if self._ready is None:
            program, _, _, sites = self._at
            self._ready = [
                Report(
                    client=client,
                    num_examples=sites.batches.num_examples(client),
                    losses=dict(zip(LOSSES, values, strict=False)),
                    scalars=dict(zip(program.phase.phase.measures, values[len(LOSSES) :], strict=True)),
                )
                for client, *values in zip(self._clients, *self.settle()[: -NUM_MOVED - 1], strict=True)
            ]
        return self._ready

    def flaws(self, norm_factor: float | None) -> dict[int, str]:
        """Clients with numbers that cannot be used, and why."""
        *numbers, health = self.settle()
        found = {
            client: "its update is not finite" if found == NOT_FINITE else "a variance or counter of it is negative"
            for client, found in zip(self._clients, health, strict=True)
            if found != FINE
        }
        told, moved = numbers[:-NUM_MOVED], numbers[-NUM_MOVED:]
        if not found and not all(map(isfinite, chain.from_iterable(told))):
            found = flaws_of_numbers(self._reports())
        return found or off_by_norms(self._clients, moved, norm_factor)

    def __getitem__(self, index: Any) -> Any:
        return self._reports()[index]

    def __len__(self) -> int:
        return len(self._clients)

    def __iter__(self) -> Iterator[Report]:
        return iter(self._reports())
