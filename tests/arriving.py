"""A federation of tiny sites that come one by one, in one process, whose halves speak in bytes alone."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

import tiny
from fednorm.core.state import digest
from fednorm.core.strategy import Strategy
from fednorm.halves import wire
from fednorm.halves.arrivals import ArrivalServer
from fednorm.halves.founding import found_arrivals
from fednorm.halves.landing import Arrival
from fednorm.halves.messages import Request, Update
from fednorm.halves.mine import Mine
from fednorm.halves.site import Site
from fednorm.running.plan import Plan


class Federation:
    """A server under a strategy and the sites of a plan; nothing but bytes goes between them."""

    def __init__(self, strategy: str | Strategy, made: Plan, model: nn.Module, **options: Any) -> None:
        data = made.federation
        self.names = [f"client-{number:03}" for number in range(len(data.clients))]
        hellos = [Site.hello(name, model, len(data.clients[n])) for n, name in enumerate(self.names)]
        self.server, welcomes = found_arrivals(
            hellos, model, made.config.method, made.work, strategy, run="t", **options
        )
        self.sites = [
            Site(
                welcomes[name].terms,
                number,
                model,
                (data.x[data.clients[number]], data.y[data.clients[number]]),
                task=made.task,
            )
            for number, name in enumerate(self.names)
        ]
        self.mine = [Mine() for _ in self.names]
        self.sent: dict[int, bytes] = {}
        self.brought: dict[int, bytes] = {}

    def dispatch(self, client: int) -> None:
        """Send a client the model; it works at once, and its answer waits."""
        self.sent[client] = wire.encode(self.server.dispatch(client))
        request = cast(Request, wire.decode(self.sent[client]))
        answer, self.mine[client] = self.sites[client].answer(request, self.mine[client])
        self.brought[client] = wire.encode(answer)

    def update(self, client: int) -> Update:
        return cast(Update, wire.decode(self.brought[client]))

    def arrive(self, client: int) -> Arrival:
        return self.server.take(self.update(client))


def fingerprint(server: ArrivalServer) -> dict[str, Any]:
    """All that equal servers have in common."""
    facts, trees = server.state()
    return {"facts": facts, "trees": {name: digest(tree) for name, tree in trees.items()}}


def federation(strategy: str | Strategy, method: str = "fedavg", clients: int = 3, **changes: Any) -> Federation:
    """Tiny clients of unequal size."""
    options = {name: changes.pop(name) for name in ("norm_factor", "weights") if name in changes}
    model = tiny.conv_net()
    made = tiny.plan(method, model=model, data=tiny.federation((8, 12, 9, 10, 11)[:clients]), **changes)
    return Federation(strategy, made, model, **options)
