"""The course of a run whose sites come one by one, each when it is ready, in real time.

    sites say hello -> begin -> [sent -> arrive]* -> the last exchanges, as in rounds -> end

A strategy makes versions of the model out of what arrives. After the last version come the exchanges that the method
asks of all sites at its end, and their tests, with the rules of rounds. What sites build on is on the disk before they
are sent it, and jobs that were under way when a server died are sent anew, with the same bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from fednorm.errors import ConfigError, FednormError, QuorumError, WireError
from fednorm.halves.arrivals import ArrivalServer
from fednorm.halves.exchange import drawn_client, drawn_cohort
from fednorm.halves.founding import found_arrivals
from fednorm.halves.landing import Arrival
from fednorm.halves.messages import Message, Refusal, Request, Update, Welcome
from fednorm.halves.server import Row, Server
from fednorm.nvflare.course import Course, Say
from fednorm.nvflare.setup import Permit, Setup
from fednorm.running.on_clock import settled
from fednorm.running.plan import work_of
from fednorm.strategies import split


class ArrivalCourse(Course):
    """A run under a strategy: what is said of rounds holds for versions of the model."""

    noun = "version"

    def __init__(
        self,
        setup: Setup,
        state: Path,
        folder: Path,
        run: str,
        say: Say,
        *,
        permit: Permit | None = None,
    ) -> None:
        super().__init__(setup, state, folder, run, say, permit=permit)
        self.strategy, self._plain = split(settled(setup.config).method)
        self.arrivals: ArrivalServer | None = None
        self.concurrency = 0
        self._unsent: list[int] = []
        """clients whose job was under way when the state was saved"""
        self._failures: Counter[int] = Counter()
        """of each client since its last update that was used"""
        self._out: set[int] = set()
        """clients that are asked no more"""

    def _founded(self) -> Mapping[str, Welcome]:
        setup, config = self.setup, self.setup.config
        self.concurrency = config.clock.concurrency or len(self.names)
        if self.concurrency > len(self.names):
            raise ConfigError(
                f"clock.concurrency={self.concurrency} but {len(self.names)} sites take part; give at most that many"
            )
        self.arrivals, welcomes = found_arrivals(
            list(self._hellos.values()),
            self.model,
            self._plain,
            work_of(config),
            self.strategy,
            run=self.run,
            norm_factor=config.engine.norm_factor,
            weights=config.train.weights,
            task=self.ledger.task.name,
            device=setup.device,
            num_classes=setup.outputs,
            input_shape=setup.input_shape,
            mean=setup.mean,
            std=setup.std,
        )
        return welcomes

    def _recalled(self) -> list[Row]:
        rows = super()._recalled()
        self._unsent = sorted(self._arrivals.busy)
        if self.arrived:
            self._begin_end(rows[-1])
        return rows if self.over or not self.arrived else rows[:-1]

    # -- versions --

    @property
    def played(self) -> int:
        return self._arrivals.version

    @property
    def round(self) -> int:
        return self.played + 1 if self.server is None else super().round

    @property
    def arrived(self) -> bool:
        """Whether all versions were made."""
        return self._arrivals.finished

    def sent(self) -> dict[str, tuple[Welcome, Request]]:
        """What idle sites are to be asked, by name: as many as there are free places. It is on the disk."""
        server, found = self._arrivals, {client: self._again(client) for client in self._unsent}
        self._unsent = []
        if not self.arrived and not (self.strategy.barrier and server.flights):
            for client in self._next():
                found[client] = server.dispatch(client)
            self._save()
        return {self.names[client]: (self._welcomes[self.names[client]], found[client]) for client in found}

    def _again(self, client: int) -> Request:
        request = self._arrivals.request(client)
        if request is None:
            raise WireError(f"client {client} has no job that could be sent anew")
        return request

    def _next(self) -> list[int]:
        """Who is sent the model now: under a barrier a cohort, else one after the other of those that are idle."""
        server, seed = self._arrivals, self._arrivals.agreed.work.seed
        here = [client for client in server.clients if client not in self._out]
        places = min(self.concurrency, len(here)) - len(server.busy)
        if self.strategy.barrier:
            return drawn_cohort(seed, server.version + 1, here, places)
        chosen: list[int] = []
        for job in range(server.number, server.number + places):
            chosen.append(drawn_client(seed, job, here, {*server.busy, *chosen}))
        return chosen

    def arrive(self, site: str, message: Message) -> Arrival | None:
        """Take what a site brought; None where nothing of it can be used, for a reason that the log has."""
        client = self.names.index(site)
        try:
            if isinstance(message, Refusal):
                raise WireError(message.why)
            if not isinstance(message, Update):
                raise WireError(f"it sent a {type(message).__name__.lower()} where an update was expected")
            if message.client != client:
                raise WireError(f"it answers for client {message.client}, and is client {client}")
            arrival = self._arrivals.take(message)
        except FednormError as error:
            self._noted(self._arrivals.give_up(client))
            self._failed(client, error)
            return None
        self._noted(arrival.row)
        if arrival.refused:
            self._failed(client, WireError(arrival.refused))
        else:
            self._failures[client] = 0
        return arrival

    def _failed(self, client: int, error: FednormError) -> None:
        """Note that a site failed; one that fails again and again is asked no more, and too few may be left."""
        engine, why = self.setup.config.engine, self._named(self.names[client], error)
        self.say(why)
        self._failures[client] += 1
        if self._failures[client] <= engine.retries or self.arrived:
            return
        self._out.add(client)
        left, count = len(self.names) - len(self._out), len(self.names)
        if engine.quorum is None:
            raise QuorumError(f"{why}; ask it again (engine.retries), or give a quorum to go on without it")
        if not left or left < engine.quorum * count:
            raise QuorumError(f"{left} of {count} sites left in {why}; engine.quorum={engine.quorum} needs more")

    def _noted(self, row: Row | None) -> None:
        """Write the row of a version that was made."""
        if row is None:
            return
        told = self.ledger.add(row, self._arrivals.reports, None)
        if self.arrived:  # the last version is told once more, with what comes at the end
            self._save()
            self._begin_end(self.ledger.rows.pop())
        else:
            self.say(self._told(told))

    # -- the end --

    def _begin_end(self, row: Row) -> None:
        """Go on as in rounds, behind the training of the last: with what the method asks at its end, and a test."""
        server, config = self._arrivals, self.setup.config
        self.server = Server(
            server.agreed,
            server.clients,
            quorum=config.engine.quorum,
            retries=config.engine.retries,
            norm_factor=config.engine.norm_factor,
            score_every=config.eval_every,
            terms=server.terms,
            sizes=server.sizes,
        )
        self.server.names = self.names
        facts, trees = server.state()
        is_over = "eval" in row  # the test is the last of all
        place = {"round": self.played if is_over else self.played - 1, "step": 0 if is_over else 1}
        self.server.load({**facts, **place, "decided": self.played, "row": row}, trees)

    @property
    def _half(self) -> ArrivalServer:
        return self._arrivals

    @property
    def _lineage(self) -> str:
        return f"{super()._lineage} {self.strategy.name}"

    def _save(self) -> None:
        """Until the end, which is played anew after a restart in its midst: sites keep nothing of it."""
        if self.server is None or self.over:
            super()._save()

    def _told(self, row: Row) -> str:
        ages = (f"{self.names[client]} {age}" for client, age in zip(row["cohort"], row["staleness"], strict=True))
        return f"{super()._told(row)}; staleness: {', '.join(ages)}"

    @property
    def _arrivals(self) -> ArrivalServer:
        if self.arrivals is None:
            raise WireError("the run has not begun; wait for all sites")
        return self.arrivals
