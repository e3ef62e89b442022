"""Exchanges of clients with unequal work: other numbers of steps, and batches that end an epoch and are smaller.

A step takes some clients out of the stacks, moves them on batches of one size, and puts them back; which ones, and in
what order, says a timetable. So a batch norm sees what it would have seen alone, and few clients are computed in vain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fednorm.core.probe import Probe
from fednorm.core.report import LOSSES
from fednorm.core.state import Tree, named
from fednorm.data.batches import Batches
from fednorm.engines.stack.making_ready import making_ready
from fednorm.engines.stack.phase_program import PhaseProgram
from fednorm.engines.stack.program import Moves, put
from fednorm.engines.stack.row_matrix import aligned_rows
from fednorm.engines.stack.timetable import Launch, timetable
from fednorm.halves.prepared_phase import CARRIED

OFTEN = 3
"""What comes more often is worth a program of its own."""


@dataclass(frozen=True)
class Table:
    """The batches of clients with unequal work, (step, client, ...), filled up with any rows where there are none."""

    rows: Tensor
    keys: Tensor
    draws: Tensor
    counts: Tensor
    """how many steps each client takes"""
    sizes: Tensor
    """of each batch; 0 where there is none"""

    @classmethod
    def of(cls, batches: Batches, work: Sequence[tuple[int, int, int]], steps: int) -> Table:
        """The next batches of clients, given as (client, first batch, how many)."""
        streams = [batches.stream(client) for client, _, _ in work]
        full = streams[0].batch_size
        batches.draw_orders(*zip(*work, strict=True))
        rows = torch.zeros(steps, len(work), full, dtype=torch.int64)
        sizes = torch.zeros(steps, len(work), dtype=torch.int64)
        for column, (stream, (_, first, count)) in enumerate(zip(streams, work, strict=True)):
            own = [stream.size(first + number) for number in range(count)]
            sizes[:count, column] = torch.tensor(own)
            for number, part in enumerate(stream.span(first, count).split(own)):
                rows[number, column, : own[number]] = part
        firsts = torch.tensor([first for _, first, _ in work])
        keys = batches.keys(torch.tensor([client for client, _, _ in work]), firsts + torch.arange(steps)[:, None])
        draws = torch.zeros(steps, len(work), *batches.draws_of_one(full), dtype=torch.int64)
        for size in set(sizes.flatten().tolist()) - {0}:
            at = (sizes == size).nonzero(as_tuple=True)
            draws[(*at, slice(size))] = batches.draws(keys[at], size)
        return cls(rows, keys, draws, torch.tensor([count for _, _, count in work]), sizes)

    def launches(self) -> list[Launch]:
        """What is played, one after the other."""
        each = zip(self.sizes.T.tolist(), self.counts.tolist(), strict=True)
        return timetable([own[:count] for own, count in each], self.rows.shape[-1])

    def message(self, launches: Sequence[Launch]) -> dict[str, Tensor]:
        """What the programs must know of it, beside the batches."""
        clients = self.sizes.shape[1]
        entries: list[int] = []
        for launch in launches:
            entries += [step * clients + client for step, client in launch.steps]
            entries += [-1 - client for client in launch.fill]
        room = torch.zeros(_entries(*self.sizes.shape), dtype=torch.int64)
        room[: len(entries)] = torch.tensor(entries)
        return {"entries": room, "counts": self.counts}


def _entries(steps: int, clients: int) -> int:
    """Room for the steps of all launches."""
    return 2 * steps * clients


class RaggedProgram(PhaseProgram):
    """The programs of a phase for clients with unequal work; `launches` are set before each exchange."""

    launches: Sequence[Launch] = ()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._times: Counter[str] = Counter()

    def _shapes(self, batches: Batches) -> dict[str, tuple[int, ...]]:
        own = {"entries": (_entries(self.steps, self.rows),), "counts": (self.rows,)}
        return {**super()._shapes(batches), **own}

    def _play(self) -> None:
        self.train()
        self._run("merge", self._merge)

    def train(self, probes: Sequence[Probe] = ()) -> None:
        looks = [probe for probe in probes if probe.see is not None]
        last = {client: number for launch in self.launches for number, client in launch.steps}
        self._run("start", self._start)
        kinds = len({(launch.width, launch.size) for launch in self.launches})
        what = f"'{self.phase.phase.name}', {kinds} kinds of steps of {self.rows} clients with unequal work"
        with making_ready(what) if self.turn == 0 else nullcontext():
            for launch in self.launches:
                ends = any(number == last[client] for number, client in launch.steps)
                self._step_of(launch.width, launch.size, looks if ends else ())

    def _step_of(self, width: int, size: int, probes: Sequence[Probe]) -> None:
        """A step with full batches, or of everybody, is most of the work; others are programs once they come often."""
        name, step = f"step of {width} on batches of {size}", partial(self._some, width, size)
        main = not probes and (size == self.batch_size or width == self.rows)
        if probes:
            name, step = self._seen(name, step, probes)
        self._times[name] += 1
        if main or self._times[name] > OFTEN:
            self._run(name, step, fused=main)
        else:
            put(self._state, *step(self._state))

    def _some(self, width: int, size: int, state: Tree, probes: tuple[Probe, ...] = ()) -> Moves:
        """A step of the next clients of the timetable, on batches of this size."""
        entry = state["entries"].index_select(0, state["step"] + torch.arange(width, device=state["step"].device))
        moves = entry >= 0
        at = torch.where(moves, entry, -1 - entry)
        who = at % self.rows
        batch = {
            name: state[name].flatten(0, 1).index_select(0, at) for name in ("batch_rows", "batch_keys", "batch_draws")
        }
        batch |= {name: batch[name][:, :size] for name in ("batch_rows", "batch_draws")}
        own = tuple(f"{part}:" for part in CARRIED)
        old = {key: aligned_rows(value, who) for key, value in state.items() if key.startswith(own)}
        start = self._anchor(state, probes)
        anchor = None if start is None else {name: flat.index_select(0, who) for name, flat in start.items()}
        new, seen = self._moved(old, batch, state["numbers"].index_select(1, who), anchor, probes)
        losses = state["losses"].flatten()
        loss = torch.where(moves, seen.loss, losses.index_select(0, at))
        rows = {key: (who, torch.where(moves.unsqueeze(1), value, old[key])) for key, value in new.items()}
        told = {"step": state["step"] + width, "losses": losses.index_copy(0, at, loss).view_as(state["losses"])}
        for key, value in named("probed", seen.probed).items():
            before = state.get(key, value.new_zeros(self.rows, *value.shape[1:]))
            moved = torch.where(moves.view(-1, *[1] * (value.dim() - 1)), value, before.index_select(0, who))
            told[key] = before.index_copy(0, who, moved)
        return told, rows

    def _loss_summary(self, state: Tree) -> Tree:
        losses, counts = state["losses"], state["counts"]
        age = torch.arange(self.steps, device=losses.device).unsqueeze(1)
        last = torch.minimum(state["last_epoch"], counts)
        taken = torch.where(age < counts, losses, 0)
        late = torch.where(age >= counts - last, taken, 0)
        newest = losses.gather(0, (counts - 1).unsqueeze(0))[0]
        return dict(zip(LOSSES, (taken.sum(0) / counts, late.sum(0) / last, newest), strict=True))
