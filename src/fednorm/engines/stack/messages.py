"""What the host sends with an exchange, made ready for several exchanges at once where everybody takes part in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fednorm.data.batches import UNION, Batches
from fednorm.engines.stack.phase_program import PhaseProgram
from fednorm.halves.exchange import Exchange
from fednorm.halves.prepared_phase import PreparedPhase

_AHEAD = 256
"""Steps whose batches are drawn at once."""
_MOST_NUMBERS = 1 << 22
"""Numbers of messages that are made at once, a share of the host's memory that nobody misses."""


@dataclass(frozen=True)
class Assignment:
    """What the clients of one run do in an exchange: the batches they go on with, and how many steps they take."""

    exchange: Exchange
    phase: PreparedPhase
    firsts: list[int]
    counts: Sequence[int]

    @property
    def clients(self) -> Sequence[int]:
        return self.exchange.cohort


@dataclass(frozen=True)
class Member:
    """A run in a stack: its batches, and where its examples begin in the pool of all."""

    run: int
    batches: Batches
    offset: int

    @property
    def num_rows(self) -> int:
        """Rows for what clients keep: one for each, and the last for the union of all."""
        return len(self.batches.pool.rows) + 1

    def row(self, client: int) -> int:
        """A client's row among those of all runs."""
        return self.run * self.num_rows + client % self.num_rows


Drawn = Sequence[Tensor]
"""(rows, keys, draws) of some steps in a row, (step, client, ...)."""


def message(members: Sequence[Member], tasks: Sequence[Assignment], batches: Sequence[Drawn]) -> dict[str, Tensor]:
    """What programs are told of one exchange of some runs, or of several that differ in their batches alone."""
    rows, keys, draws = ([drawn[part] for drawn in batches] for part in range(3))
    client_rows, sizes, last = [], [], []
    for member, task in zip(members, tasks, strict=True):
        client_rows += [member.row(client) for client in task.clients]
        sizes += [member.batches.num_examples(client) for client in task.clients]
        last += [member.batches.per_epoch(client) for client in task.clients]
    return {
        "batch_rows": torch.cat([own + member.offset for member, own in zip(members, rows, strict=True)], 1),
        "batch_keys": torch.cat(keys, 1),
        "batch_draws": torch.cat(draws, 1),
        "numbers": torch.cat([_numbers(task).expand(-1, len(task.clients)) for task in tasks], 1).contiguous(),
        "client_rows": torch.tensor(client_rows),
        "num_examples": torch.tensor(sizes),
        "last_epoch": torch.tensor(last),
        "runs": torch.tensor([member.run for member in members]),
    }


def _numbers(task: Assignment) -> Tensor:
    return torch.tensor(list(task.exchange.numbers.values()), dtype=torch.float64).unsqueeze(1)


class Messages:
    """The messages of the next exchanges of some runs, as a program takes them.

    A round of one step is over in a millisecond, in which a host that composed its message would hardly do more than
    that. So where all clients take part in every round, those of many rounds are composed in one go: the first time as
    many as may be, then twice as many as were of use the last time.
    """

    def __init__(self) -> None:
        self._begun: list[Assignment] = []
        """what the first of these exchanges has each run do"""
        self._flat = torch.empty(0, 0)
        self._sent, self._used = -1, _AHEAD
        """the last message that was sent, and how many were"""

    def next(self, program: PhaseProgram, members: Sequence[Member], tasks: Sequence[Assignment]) -> Tensor:
        """The message of the exchange that these runs, always the same ones, are to do now."""
        at = self._place(program, tasks)
        if at is None or not self._with_numbers(at, program, tasks):
            self._make(program, members, tasks)
            at = 0
        if at > self._sent:
            self._sent, self._used = at, self._used + 1
        return self._flat[at]

    def _place(self, program: PhaseProgram, tasks: Sequence[Assignment]) -> int | None:
        """Which of the messages is the one for these tasks, if any."""
        if not self._begun:
            return None
        ahead = tasks[0].firsts[0] - self._begun[0].firsts[0]
        for begun, task in zip(self._begun, tasks, strict=True):
            if task.clients != begun.clients or task.firsts != [first + ahead for first in begun.firsts]:
                return None
        at, rest = divmod(ahead, program.steps)
        return at if rest == 0 and 0 <= at < len(self._flat) else None

    def _with_numbers(self, at: int, program: PhaseProgram, tasks: Sequence[Assignment]) -> bool:
        """Whether the messages from one on have these numbers, or could be given them: not where it is under way."""
        for place, (begun, task) in enumerate(zip(self._begun, tasks, strict=True)):
            if task.exchange.numbers == begun.exchange.numbers:
                continue
            if at <= self._sent:
                return False
            numbers = program.part(self._flat[at:], "numbers").view(torch.float64).unflatten(1, (-1, program.rows))
            numbers[:, :, place * program.clients : (place + 1) * program.clients] = _numbers(task)
            self._begun[place] = replace(begun, exchange=task.exchange)
        return True

    def _make(self, program: PhaseProgram, members: Sequence[Member], tasks: Sequence[Assignment]) -> None:
        count = self._many(program, members, tasks)
        drawn: list[Drawn] = []
        for member, task in zip(members, tasks, strict=True):
            rows, keys = member.batches.span(task.clients, task.firsts, count * program.steps)
            drawn.append((rows, keys, member.batches.draws(keys, rows.shape[-1])))
        self._flat = program.flat(message(members, tasks, drawn), count)
        self._begun, self._sent, self._used = list(tasks), -1, 0

    def _many(self, program: PhaseProgram, members: Sequence[Member], tasks: Sequence[Assignment]) -> int:
        """How many exchanges are made ready: one where clients may change, else those whose batches have one size."""
        each = list(zip(members, tasks, strict=True))
        if not all(list(task.clients) in ([UNION], list(member.batches.pool.clients)) for member, task in each):
            return 1
        streams = [
            (member.batches.stream(client), first)
            for member, task in each
            for client, first in zip(task.clients, task.firsts, strict=True)
        ]
        steps = min(_AHEAD, *(stream.alike_from(first, _AHEAD) for stream, first in streams))
        return max(1, min(steps // program.steps, _MOST_NUMBERS // program.message_size, 2 * self._used))
