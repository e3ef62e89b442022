"""The course of a run at the server, whatever carries its messages: who came, what is asked, what came of it.

    sites say hello -> begin -> [asked -> take, take, ... -> close]* -> end

What was merged is on the disk before anybody is asked for something that builds on it, so a server that is started
again goes on from there. Whatever cannot be used is refused with one line that names site, round and entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fednorm.core.phases import Purpose
from fednorm.errors import CheckpointError, FednormError, WireError
from fednorm.halves.arrivals import ArrivalServer
from fednorm.halves.founding import found
from fednorm.halves.messages import Address, Hello, Message, Refusal, Request, Scores, Terms, Update, Welcome
from fednorm.halves.server import Row, Server
from fednorm.halves.terms import model_digest
from fednorm.halves.wire import check_hello
from fednorm.halves.wire_files import load, save
from fednorm.nvflare.keeping import lineage
from fednorm.nvflare.ledger import Ledger
from fednorm.nvflare.setup import Permit, Setup
from fednorm.running.plan import work_of

Say = Callable[[str], None]
"""Where lines for people go."""


class Course:
    """A synchronous run: exchange by exchange, each closed before the next is opened."""

    noun = "round"

    def __init__(
        self, setup: Setup, state: Path, folder: Path, run: str, say: Say, *, permit: Permit | None = None
    ) -> None:
        """`state` is the file that survives, `folder` is for the records, `permit` refuses code that a job names."""
        setup.load_extensions(permit)
        self.setup, self.state, self.run, self.say = setup, state, run, say
        self.method = setup.method
        self.model = setup.network(permit)
        setup.set_threads()
        self.ledger = Ledger(folder, setup)
        self.server: Server | None = None
        self.names: list[str] = []
        """of the sites, by their number"""
        self._hellos: dict[str, Hello] = {}
        self._welcomes: Mapping[str, Welcome] = {}
        self._schema = model_digest(self.model)
        self._scores: dict[str, Any] | None = None

    # -- hellos --

    def greet(self, site: str, message: Message) -> None:
        """Take a site's hello; one that cannot take part is refused by name."""
        try:
            if isinstance(message, Refusal):
                raise WireError(message.why)
            if not isinstance(message, Hello):
                raise WireError(f"it sent a {type(message).__name__.lower()} where a hello was expected")
            if message.name != site:
                raise WireError(f"it calls itself '{message.name}'; a site speaks for itself only")
            check_hello(message, self._schema)
        except FednormError as error:
            raise WireError(f"site '{site}', before the first {self.noun}: {error}") from None
        self._hellos[site] = message

    @property
    def greeted(self) -> frozenset[str]:
        """Sites that said hello."""
        return frozenset(self._hellos)

    def begin(self) -> None:
        """Come to terms with all that said hello, and go on from the state of this run, if there is one."""
        self.names = sorted(self._hellos)
        self._welcomes = self._founded()
        self.ledger.begin(self._recalled(), self.run, self.names)
        self._save()

    def _founded(self) -> Mapping[str, Welcome]:
        """Make the server's half of the method: what each site is welcomed with."""
        config, engine = self.setup.config, self.setup.config.engine
        self.server, welcomes = found(
            list(self._hellos.values()),
            self.model,
            self.method,
            work_of(config),
            run=self.run,
            per_round=config.cohort_size(len(self._hellos)),
            quorum=engine.quorum,
            retries=engine.retries,
            norm_factor=engine.norm_factor,
            score_every=config.eval_every,
            weights=config.train.weights,
            task=self.ledger.task.name,
            device=self.setup.device,
        )
        self.server.names = self.names
        return welcomes

    def _recalled(self) -> list[Row]:
        """Go on from the disk: the rows of the rounds that are over."""
        terms = self._terms
        try:
            facts, trees = load(self.state)
        except FileNotFoundError:
            self.say(f"run '{self.run}' starts clean; its state is kept in '{self.state.parent}'")
            return []
        rows, kept, rounds = facts.pop("rows"), facts.pop("lineage"), facts.pop("rounds")
        if kept != self._lineage:
            raise CheckpointError(
                f"'{self.state}' is of run '{self.run}' with another method, model, sites or settings; "
                "give those it was begun with, or another run_id"
            )
        self._half.load({**facts, "terms": terms.digest}, trees)
        wanted = self.setup.config.rounds
        if self.played > wanted:
            raise CheckpointError(f"run '{self.run}' has {self.played} {self.noun}s already; give more than that")
        longer = f", which had {rounds}: what follows from the number follows the new one" if rounds != wanted else ""
        self.say(f"run '{self.run}' goes on after {self.noun} {self.played} of {wanted}{longer}")
        return rows

    # -- exchanges --

    @property
    def over(self) -> bool:
        return self.server is not None and self.server.finished

    @property
    def played(self) -> int:
        """Rounds that are over."""
        return self._server.round

    @property
    def round(self) -> int:
        """The round that is open, or the last."""
        exchange = None if self.server is None else self.server.open()
        return exchange.round if exchange else self.setup.config.rounds

    def asked(self) -> dict[str, tuple[Welcome, Request]]:
        """What sites that have not answered are to be asked, by name; the state they build on is on the disk."""
        wanted = {self.names[client]: request for client, request in self._server.requests().items()}
        return {site: (self._welcomes[site], request) for site, request in wanted.items() if site in self.missing}

    def take(self, site: str, message: Message) -> bool:
        """Take a site's answer; False for one that came already. What cannot be used is refused, and counts so."""
        client = self.names.index(site)
        try:
            if isinstance(message, Refusal):
                raise WireError(message.why)
            if not isinstance(message, Update | Scores):
                raise WireError(f"it sent a {type(message).__name__.lower()} where an answer was expected")
            if message.client != client:
                raise WireError(f"it answers for client {message.client}, and is client {client}")
            return self._server.take(message)
        except FednormError as error:
            if isinstance(message, Update | Scores) and message.address != self._address(client):
                raise WireError(self._named(site, error)) from None  # late: what is open now may still be answered
            raise self.refused(site, error) from None

    def refused(self, site: str, error: FednormError) -> WireError:
        """Count a site's answer as refused, for a reason that its row will have."""
        self._server.turned_away.setdefault(self.names.index(site), str(error))
        return WireError(self._named(site, error))

    def _named(self, site: str, error: FednormError) -> str:
        return f"site '{site}', {self.noun} {self.round}: {error}"

    def _address(self, client: int) -> Address | None:
        """Of what a client is asked now; None where it has answered, or was not asked."""
        request = self._server.requests().get(client)
        return request.address if request else None

    @property
    def missing(self) -> list[str]:
        """Sites whose answer may still come."""
        waiting, away = self._server.missing, self._server.turned_away
        return [self.names[client] for client in waiting if client not in away]

    def close(self) -> Row | None:
        """Merge what came and go on; the row of a round that is over with it. A run that cannot go on raises."""
        server, exchange = self._server, self._server.open()
        if exchange is None:
            return None
        if exchange.purpose is Purpose.SCORE:
            self._scores = self.ledger.scored(exchange.phase, server.tree, server.scores)
        server.close()
        row = None
        if server.round > len(self.ledger.rows):
            row = self.ledger.add(server.row, server.reports, self._scores)
            self._scores = None
        self._save()
        if row is not None:
            self.say(self._told(row))
        return row

    def end(self) -> None:
        """Write what came out."""
        self.ledger.finish(self.setup.name, self._server.tree, self.names)

    def _save(self) -> None:
        facts, trees = self._half.state()
        about = {"rows": self.ledger.rows, "lineage": self._lineage, "rounds": self.setup.config.rounds}
        save(self.state, {**facts, **about}, trees)

    def _told(self, row: Row) -> str:
        refused = {self.names[client]: why for client, why in row.get("refused", {}).items()}
        metric = self.ledger.task.metric
        scores = [f"{name} {metric} {each[metric]:.4g}" for name, each in row.get("eval", {}).items()]
        parts = [f"loss {row['train_loss']:.4g}", *scores, f"{row['bytes_up']} bytes up, {row['bytes_down']} down"]
        parts += [f"without {site}: {why}" for site, why in refused.items()]
        return f"{self.noun} {row['round']} of {self.setup.config.rounds}: {'; '.join(parts)}"

    @property
    def _server(self) -> Server:
        if self.server is None:
            raise WireError("the run has not begun; wait for all sites")
        return self.server

    @property
    def _half(self) -> Server | ArrivalServer:
        """Whose state survives."""
        return self._server

    @property
    def _lineage(self) -> str:
        """What a state must be of to be gone on from."""
        return lineage(self._terms)

    @property
    def _terms(self) -> Terms:
        terms = self._half.terms
        if terms is None:
            raise WireError("the run has no terms; begin it with hellos")
        return terms
