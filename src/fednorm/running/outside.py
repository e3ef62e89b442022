"""Exchanges that take no virtual time: the statistics that a test needs, and what comes after the last version."""

from __future__ import annotations

from collections.abc import Sequence

from fednorm.core.phases import PhaseId, Purpose
from fednorm.core.state import Tree
from fednorm.engines.base import Engine, Order
from fednorm.errors import FednormError
from fednorm.halves.exchange import Held
from fednorm.halves.server import Row, Server
from fednorm.running.plan import Plan
from fednorm.running.store import Store


class _Outside(Server):
    """A server that asks all clients for some exchanges between two versions, and for nothing else."""

    def __init__(self, plan: Plan, tree: Tree, memory: Tree, version: int, stage: int, ids: Sequence[PhaseId]) -> None:
        super().__init__(
            plan,
            plan.federation.training_clients,
            quorum=plan.config.engine.quorum,
            retries=plan.config.engine.retries,
            norm_factor=plan.config.engine.norm_factor,
            held=Held(tree, memory),
            keep_reported=False,
        )
        self._ids = list(ids)
        self.round, self._decided, self.stage = version - 1, version, stage
        self.row = dict.fromkeys(("exchanges", "bytes_up", "bytes_down"), 0)

    def _exchanges(self, number: int) -> list[PhaseId]:
        return self._ids


def due_outside(plan: Plan, version: int, tested: bool) -> list[PhaseId]:
    """What is asked of all clients after a version: before a test, and after the last."""
    method, last = plan.method, version == plan.work.rounds
    ids = [PhaseId(Purpose.FINISH, 0, index) for index in range(len(method.finish))] if last else []
    return ids + [PhaseId(Purpose.QUERY)] * (method.query is not None and (tested or last))


def ask_outside(
    plan: Plan, store: Store, engine: Engine, held: Held, version: int, stage: int, ids: Sequence[PhaseId]
) -> tuple[Held, Row]:
    """What the server holds after some exchanges with all clients, and what they cost; what it held stays as it was."""
    server = _Outside(plan, held.tree, held.memory, version, stage, ids)
    while server.round < version:
        exchange = server.open()
        if exchange is None:
            break
        (played,) = engine.exchange([Order(exchange, server, plan, store)])
        if isinstance(played, FednormError):
            raise played
        server.note(played.reports, played.probed, played.joined)
    return Held(server.held.tree, server.held.memory), server.row
