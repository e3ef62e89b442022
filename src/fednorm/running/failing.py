"""The server of a simulated run, in whose world clients may be gone or slow. Over a wire they are so by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fednorm.core.phases import PhaseId, Purpose
from fednorm.core.world import World
from fednorm.data.batches import UNION
from fednorm.halves.exchange import Exchange
from fednorm.halves.prepared_phase import PreparedPhase
from fednorm.halves.server import Server
from fednorm.halves.site import Sites


class WorldServer(Server):
    """A server that cannot reach some of the clients it draws, and whose slow ones do a part of their steps.

    A client that is gone takes no part in any exchange of the round: nothing is sent to it, it is not refused, and a
    quorum counts those that are there. One that is slow weighs as much as otherwise.
    """

    def __init__(self, sites: Sites, clients: Sequence[int], *, world: World, **named: Any) -> None:
        super().__init__(sites, clients, **named)
        self.sites, self.world = sites, world
        self._there: tuple[int | None, list[int]] = None, []
        """a round and who is there"""

    def cohort(self, round: int, phase: PreparedPhase) -> Sequence[int]:
        drawn = super().cohort(round, phase)
        if self.world.spares_all or phase.id.purpose is not Purpose.TRAIN or list(drawn) == [UNION]:
            return drawn
        if self._there[0] != round:  # once a round, though every one of its exchanges asks
            self._there = round, self.world.present(round, drawn)
        return self._there[1]

    def open(self) -> Exchange | None:
        is_new = self._open is None
        exchange = super().open()
        if exchange is None or not is_new or self.world.spares_all or exchange.purpose is not Purpose.TRAIN:
            return exchange
        shares = {} if list(exchange.cohort) == [UNION] else self.world.shares(exchange.round, exchange.cohort)
        self._open = replace(exchange, shares=shares)
        return self._open

    def _begin_round(self, number: int) -> None:
        super()._begin_round(number)
        if self.world.spares_all:
            return
        first = self.agreed.phase(PhaseId(Purpose.TRAIN, self.stage))
        there = self.cohort(number, first)
        if list(there) == [UNION]:
            return
        if gone := sorted(set(super().cohort(number, first)) - set(there)):
            self.row["dropped"] = gone
        if slow := self._straggled(self.world.shares(number, there)):
            self.row["straggled"] = slow

    def _straggled(self, shares: dict[int, float]) -> dict[int, int]:
        """Steps in the round of those clients that do fewer than usual."""
        count = len(self.agreed.method.stages[self.stage])
        phases = [self.agreed.phase(PhaseId(Purpose.TRAIN, self.stage, index)) for index in range(count)]

        def steps(client: int, share: float) -> int:
            return sum(self.sites.num_steps(client, phase, share) for phase in phases)

        done = {client: steps(client, share) for client, share in shares.items()}
        return {client: number for client, number in done.items() if number < steps(client, 1.0)}
