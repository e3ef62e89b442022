"""A federation in one process whose halves speak in bytes alone, and in which either may die at any moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from fednorm.core.state import digest
from fednorm.data.federation import Federation
from fednorm.halves import wire
from fednorm.halves.messages import Message, Refusal, Request, Welcome
from fednorm.halves.mine import Mine
from fednorm.halves.reception import Reception
from fednorm.halves.site import Site
from fednorm.running.plan import Plan


class Killed(Exception):
    """A process ended here."""


Point = Callable[[str], None]
"""Called with the name of every point at which a process could die; it may raise `Killed`."""


def live_on(point: str) -> None:
    """Nobody dies."""


@dataclass
class Desk:
    """The server's process."""

    plan: Plan
    model: nn.Module
    folder: Path
    options: dict[str, Any]
    point: Point
    bytes: list[bytes] = field(default_factory=list)
    desk: Reception | None = None

    def started(self) -> Reception:
        if self.desk is None:
            clients = len(self.plan.federation.clients)
            method, work = self.plan.config.method, self.plan.work
            self.desk = Reception(self.folder / "server", clients, self.model, method, work, run="t", **self.options)
        return self.desk

    def handle(self, data: bytes) -> list[bytes]:
        self.bytes.append(data)
        try:
            self.point("server received")
            answers = [wire.encode(answer) for answer in self.started().handle(wire.decode(data))]
            self.point("server answers")
        except Killed:
            self.desk = None
            return []
        self.bytes += answers
        return answers


@dataclass
class Client:
    """A client's process: its data, its file, and nothing of anybody else's."""

    number: int
    plan: Plan
    model: nn.Module
    folder: Path
    point: Point
    site: Site | None = None
    mine: Mine | None = None

    @property
    def name(self) -> str:
        return f"client-{self.number:03}"

    def turn(self, desk: Desk) -> None:
        """Say hello, and do what is asked for; after a kill all that is left is the file."""
        try:
            self._turn(desk)
        except Killed:
            self.site = self.mine = None

    def _turn(self, desk: Desk) -> None:
        data: Federation = self.plan.federation
        rows = data.clients[self.number]
        answers = [wire.decode(each) for each in desk.handle(wire.encode(Site.hello(self.name, self.model, len(rows))))]
        request = answers[-1] if answers else Refusal("")
        if not isinstance(request, Request):
            return
        welcome: Message = answers[0]
        assert isinstance(welcome, Welcome)
        if self.site is None:
            own = data.x[rows], data.y[rows]
            test = data.test_x[data.own_test[self.number]], data.test_y[data.own_test[self.number]]
            self.site = Site(welcome.terms, welcome.client, self.model, own, task=self.plan.task, test=test)
        mine = wire.load_mine(self.folder / self.name) if self.mine is None else self.mine
        answer, self.mine = self.site.answer(request, mine)
        self.point("client worked")
        wire.save_mine(self.folder / self.name, self.mine)
        self.point("client saved")
        desk.handle(wire.encode(answer))
        self.point("client sent")


@dataclass
class Played:
    """What is left when the run is over."""

    desk: Reception
    clients: list[Client]
    bytes: list[bytes]

    @property
    def fingerprint(self) -> dict[str, Any]:
        """As `fingerprint_of` a run in the simulator."""
        server = self.desk.server
        assert server is not None
        kept = [wire.load_mine(client.folder / client.name).accepted for client in self.clients]
        return {
            "server": digest(server.tree),
            "memory": digest(server.held.memory),
            "clients": [(state.steps, digest(state.tree)) for state in kept],
            "stages": [row["stage"] for row in self.desk.rows],
            "sent": [(row["exchanges"], row["bytes_up"], row["bytes_down"]) for row in self.desk.rows],
        }


def fingerprint_of(run: Any) -> dict[str, Any]:
    """What both ways of playing a run have in common."""
    run.stop()
    states = run.store.get_many(range(len(run.plan.federation.clients)))
    rows = list(run.store.rows())
    return {
        "server": digest(run.server.tree),
        "memory": digest(run.server.held.memory),
        "clients": [(state.steps, digest(state.tree)) for state in states.values()],
        "stages": [row["stage"] for row in rows],
        "sent": [(row["exchanges"], row["bytes_up"], row["bytes_down"]) for row in rows],
    }


def play(plan: Plan, model: nn.Module, folder: Path, point: Point = live_on, **options: Any) -> Played:
    """Play a plan's method over a wire, until it is finished; clients come in another order every time."""
    options = {"per_round": plan.cohort_size, "score_every": plan.config.eval_every, **options}
    desk = Desk(plan, model, folder, options, point)
    clients = [Client(number, plan, model, folder, point) for number in range(len(plan.federation.clients))]
    for number in _turns(len(clients)):
        clients[number].turn(desk)
        if desk.desk is not None and desk.desk.over:
            return Played(desk.desk, clients, desk.bytes)
    raise AssertionError("the run does not end")


def _turns(count: int) -> Iterator[int]:
    for turn in range(5000):
        yield (turn * 7 + turn // count) % count
