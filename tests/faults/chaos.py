"""Clients that misbehave, in whatever engine trains them: what they send is spoiled, or their data fail when read."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tiny
from fednorm.core.report import Report
from fednorm.data.federation import Federation
from fednorm.data.given import from_clients
from fednorm.engines.base import Engine, Order, PlainEngine, Played
from fednorm.engines.choose import make_engine
from fednorm.errors import FednormError
from fednorm.halves.messages import Update
from fednorm.halves.prepared_phase import PreparedPhase
from fednorm.halves.training import Job, Outcome
from fednorm.running.config import updated
from fednorm.running.plan import Plan
from fednorm.running.run import Run
from fednorm.running.store import Store

ENGINES = ("sequential", "workers", "stacked")
CLIENTS, BAD = 10, 3
Spoil = Callable[[int, Outcome], Iterable[Outcome]]
"""(round, what a client would hand over) -> what arrives in its place."""


@dataclass
class Chaos(PlainEngine):
    """Another engine's training, of which something else arrives."""

    inner: Engine
    spoil: Spoil
    round: int = 0

    def exchange(self, orders: Sequence[Order]) -> list[Played | FednormError]:
        self.round = orders[0].exchange.round
        return super().exchange(orders)

    def train(self, phase: PreparedPhase, jobs: Sequence[Job], probing: bool = False) -> Iterator[Outcome]:
        for outcome in self.inner.train(phase, jobs, probing):
            yield from self.spoil(self.round, outcome)

    def close(self) -> None:
        self.inner.close()


def started(plan: Plan, spoil: Spoil, store: Store | None = None) -> Run:
    """A run in which something else arrives than clients hand over."""

    def make(plan: Plan, remembered: str | None, stays: bool) -> tuple[str, Engine]:
        name, engine = make_engine([plan], plan.config.engine, cohort=plan.cohort_size, stays=False)
        return name, Chaos(engine, spoil)

    return Run(plan, store or Store(), make=make)


def federation(sizes: Sequence[int] = (8,) * CLIENTS) -> Federation:
    return tiny.federation(sizes)


def plan(engine: str, method: str = "fedavg", *, data: Federation | None = None, **changes: Any) -> Plan:
    """Ten clients and a tiny network with a batch norm; a fifth of the clients may be missing."""
    settings = {"engine__quorum": 0.8, "eval__every": 100, "rounds": 3, **tiny.engine(engine), **changes}
    return tiny.plan(method, model=tiny.conv_net(), data=data or federation(), **settings)


def without(plan: Plan, *clients: int) -> Run:
    """The run that nothing disturbs, of the clients that remain; processes, which have the same bits, are spared."""
    if plan.config.engine.name == "workers":
        plan = replace(plan, config=updated(plan.config, {"engine.name": "sequential"}))
    run = Run(plan, Store())
    run.server.clients = [client for client in run.server.clients if client not in clients]
    run.server.per_round = len(run.server.clients)
    list(run.rounds())
    return run


def same(left: Run, right: Run) -> bool:
    """Whether two servers have the same bits; stacks round otherwise with another client, and have the same numbers."""
    close = left.engine_name == "stacked"
    for key, value in left.server.tree.items():
        other = right.server.tree[key]
        if not (torch.allclose(value, other, rtol=1e-9, atol=1e-12) if close else torch.equal(value, other)):
            return False
    return True


def rows(run: Run) -> list[dict[str, Any]]:
    """The rows that were kept, refusals by client id."""
    each: list[dict[str, Any]] = [dict(row) for row in run.store.rows()]
    return [
        row | {"refused": {int(client): why for client, why in row["refused"].items()}} if "refused" in row else row
        for row in each
    ]


def only(client: int, change: Callable[[Outcome], Iterable[Outcome]]) -> Spoil:
    """Spoil what one client sends."""
    return lambda round, outcome: change(outcome) if outcome.update.client == client else [outcome]


def sending(outcome: Outcome, **entries: object) -> Outcome:
    """The outcome with other entries, `x__y` for `x.y`; None leaves one out."""
    named = {key.replace("__", ".").removeprefix("_"): value for key, value in entries.items()}
    shared: dict[str, Any] = {**outcome.update.shared, **named}
    shared = {key: value for key, value in shared.items() if value is not LEFT_OUT}
    return replace(outcome, update=replace(outcome.update, shared=shared))


LEFT_OUT = object()


def reporting(outcome: Outcome, **changes: Any) -> Outcome:
    """The outcome with other words in its report."""
    update: Update = outcome.update
    report: Report = replace(update.report, **changes)
    return replace(outcome, update=replace(update, report=report))


class Fragile(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """A client's data, which while there is a file at `trap` fail, end their process, or have a pixel that is none."""

    def __init__(self, x: Tensor, y: Tensor, trap: Path | None, how: str = "error") -> None:
        self.x, self.y, self.trap, self.how = x, y, trap, how

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.trap is not None and self.trap.exists():
            if self.how == "error once":
                self.trap.unlink()
            if self.how == "nan":
                return self.x[index].index_fill(-1, torch.tensor([0]), torch.nan), self.y[index]
            self.fail()
        return self.x[index], self.y[index]

    def fail(self) -> None:
        if self.how == "memory":
            raise MemoryError("no room for an example")
        in_child = multiprocessing.parent_process() is not None
        if self.how == "kill" and in_child:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "limit" and in_child:
            least, most = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (64 << 20, most))
            try:
                torch.ones(1 << 30)
            finally:
                resource.setrlimit(resource.RLIMIT_AS, (least, most))
        raise RuntimeError("the disk is on fire")


def fragile(trap: Path, how: str = "error", clients: Sequence[int] = (BAD,)) -> Federation:
    """Ten clients whose data are read when they are needed; those of some fail while there is a file at `trap`."""
    train = [
        Fragile(*tiny.examples(8, shift=client - 1.0, seed=client + 1), trap if client in clients else None, how)
        for client in range(CLIENTS)
    ]
    test = [tiny.examples(6, shift=client - 1.0, seed=client + 101) for client in range(CLIENTS)]
    return from_clients(train, test, num_classes=tiny.NUM_CLASSES, read="anew")
