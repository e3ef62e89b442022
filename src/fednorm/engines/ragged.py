"""Exchanges of clients with unequal work: other numbers of steps, and batches that end an epoch and are smaller.

A step moves all clients whose batch is full, as one stack; the others, and those that are done, are computed along and
left as they were. A smaller batch is a step of its client alone. So a batch norm sees what it would have seen alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fednorm.batches import Batches
from fednorm.client import training_mode
from fednorm.engines.exchange import LOSSES, PARTS, Exchange
from fednorm.engines.program import Rows, put
from fednorm.state import Tree

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
        rows = torch.zeros(steps, len(work), full, dtype=torch.int64)
        sizes = torch.zeros(steps, len(work), dtype=torch.int64)
        for place, (stream, (_, first, count)) in enumerate(zip(streams, work, strict=True)):
            own = [stream.size(first + number) for number in range(count)]
            sizes[:count, place] = torch.tensor(own)
            for number, part in enumerate(stream.span(first, count).split(own)):
                rows[number, place, : own[number]] = part
        firsts = torch.tensor([first for _, first, _ in work])
        keys = batches.keys(torch.tensor([client for client, _, _ in work]), firsts + torch.arange(steps)[:, None])
        draws = batches.draws(keys, full)
        for step, place in ((sizes > 0) & (sizes < full)).nonzero().tolist():
            size = int(sizes[step, place])
            draws[step, place, :size] = batches.draws(keys[step, place : place + 1], size)[0]
        return cls(rows, keys, draws, torch.tensor([count for _, _, count in work]), sizes)

    @property
    def full(self) -> Tensor:
        """Which batches are full."""
        return self.sizes == self.rows.shape[-1]

    def order(self) -> list[int]:
        """What is played, one after the other: 0 is a step of all clients with full batches, a size one of a client."""
        smaller = torch.where(self.full, 0, self.sizes)
        played = []
        for any_full, row in zip(self.full.any(1).tolist(), smaller.tolist(), strict=True):
            played += [0] * any_full + [size for size in row if size]
        return played

    def message(self) -> dict[str, Tensor]:
        """What the programs must know of it, beside the batches."""
        steps, clients = self.sizes.shape
        smaller = ((self.sizes > 0) & ~self.full).flatten().nonzero().flatten()
        whole = self.full.any(1).nonzero().flatten()
        return {
            "full": self.full.to(torch.int64),
            "counts": self.counts,
            "whole": torch.nn.functional.pad(whole, (0, steps - len(whole))),
            "smaller": torch.nn.functional.pad(smaller, (0, steps * clients - len(smaller))),
        }


class RaggedExchange(Exchange):
    """The programs of a phase for clients with unequal work; `order` is set before each exchange."""

    order: Sequence[int] = ()

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._own["turn"] = torch.zeros_like(self._own["step"])
        self._times: Counter[int] = Counter()

    def _shapes(self, batches: Batches, size: int) -> dict[str, tuple[int, ...]]:
        own = {"full": (self.steps, self.rows), "counts": (self.rows,), "whole": (self.steps,)}
        return {**super()._shapes(batches, size), **own, "smaller": (self.steps * self.rows,)}

    def _play(self) -> None:
        self._run("start", self._start)
        for size in self.order:
            if size == 0:
                self._run("step", self._step)
            else:
                self._step_of_one(size)
        self._run("merge", self._merge)

    def _step_of_one(self, size: int) -> None:
        name, step = f"step of {size}", partial(self._smaller, size)
        self._times[size] += 1
        if self._times[size] > OFTEN:
            self._run(name, step)
            return
        with training_mode(self.plan.prepared.model, self.phase.rule.hold):
            put(self._state, *step(self._state))

    def _start(self, state: Tree) -> tuple[Tree, Rows]:
        new, rows = super()._start(state)
        return {**new, "turn": torch.zeros_like(state["turn"])}, rows

    def _step(self, state: Tree) -> tuple[Tree, Rows]:
        at = state["whole"].index_select(0, state["step"])
        moves = state["full"].index_select(0, at)[0] > 0
        new, rows = super()._step({**state, "step": at})
        kept = {key: torch.where(moves.unsqueeze(1), value, state[key]) for key, value in new.items() if key != "step"}
        loss = torch.where(moves, rows["losses"][1], state["losses"].index_select(0, at))
        return {**kept, "step": state["step"] + 1}, {"losses": (at, loss)}

    def _smaller(self, size: int, state: Tree) -> tuple[Tree, Rows]:
        """A step of one client with a batch of this size."""
        at = state["smaller"].index_select(0, state["turn"])
        who = at % self.rows
        batch = {
            name: state[name].flatten(0, 1).index_select(0, at) for name in ("batch_rows", "batch_keys", "batch_draws")
        }
        batch |= {name: batch[name][:, :size] for name in ("batch_rows", "batch_draws")}
        own = tuple(f"{part}:" for part in PARTS)
        one = {key: value.index_select(0, who) for key, value in state.items() if key.startswith(own)}
        start = self._anchor(state)
        anchor = None if start is None else {name: flat.index_select(0, who) for name, flat in start.items()}
        new, loss = self._moved(one, batch, state["numbers"].index_select(1, who), anchor)
        losses = state["losses"].flatten().index_copy(0, at, loss).view_as(state["losses"])
        return {"turn": state["turn"] + 1, "losses": losses}, {key: (who, value) for key, value in new.items()}

    def _loss_summary(self, state: Tree) -> Tree:
        losses, counts = state["losses"], state["counts"]
        age = torch.arange(self.steps, device=losses.device).unsqueeze(1)
        last = torch.minimum(state["last_epoch"], counts)
        taken = torch.where(age < counts, losses, 0)
        late = torch.where(age >= counts - last, taken, 0)
        newest = losses.gather(0, (counts - 1).unsqueeze(0))[0]
        return dict(zip(LOSSES, (taken.sum(0) / counts, late.sum(0) / last, newest), strict=True))
