"""A server behind any transport: it is given one message at a time, says what to answer, and survives a restart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from fednorm.core.method import Method
from fednorm.errors import DivergedError, FednormError, QuorumError, WireError
from fednorm.halves.founding import found
from fednorm.halves.messages import Hello, LocalWork, Message, Refusal, Scores, Update, Welcome
from fednorm.halves.server import Row, Server
from fednorm.halves.terms import model_digest, refuse_needs
from fednorm.halves.wire import check_hello
from fednorm.halves.wire_files import load, save
from fednorm.methods import parse

WAIT = "nothing is asked of you yet; say hello again later"


class Reception:
    """Receives clients that come when they like: they say hello and are asked for something, or bring an answer.

    The run begins once all have said hello. Whatever was merged is in the file at `path` before anybody is asked for
    something that builds on it, so a server that is killed goes on from there, once the clients are back.
    """

    def __init__(
        self, path: Path, clients: int, model: nn.Module, method: str | Method, work: LocalWork, **options: Any
    ) -> None:
        refuse_needs(parse(method))
        self.path = path
        self.clients = clients
        self.server: Server | None = None
        self.rows: list[Row] = []
        """of the rounds that are over"""
        self.failure: FednormError | None = None
        """why the run ended early: a client diverged, or too few could be used"""
        self._made_of = model, method, work, options
        self._schema = model_digest(model)
        self._hellos: dict[str, Hello] = {}
        self._welcomes: Mapping[str, Welcome] = {}

    @property
    def over(self) -> bool:
        """Whether the run is finished, or cannot go on because of `failure`."""
        return self.failure is not None or (self.server is not None and self.server.finished)

    def handle(self, message: Message) -> list[Message]:
        """What to answer: a welcome and a request, or refusals to come again later; to an answer, nothing.

        A message that cannot be used raises, and changes nothing.
        """
        if isinstance(message, Hello):
            self._greet(message)
            return self._answers(message.name)
        if not isinstance(message, Update | Scores) or self.server is None:
            raise WireError(f"a {type(message).__name__.lower()} came where a hello or an answer was expected")
        self.server.take(message)
        while not self.over and not self.server.missing:
            self.close()
        return []

    def close(self) -> None:
        """Go on from the open exchange, without clients that have not answered if the quorum allows it."""
        if self.server is None:
            raise WireError("the run has not begun; wait for all clients")
        try:
            self.server.close()
        except (DivergedError, QuorumError) as failure:
            self.failure = failure
            raise
        if self.server.round > len(self.rows):
            self.rows.append(self.server.row)
        facts, trees = self.server.state()
        save(self.path, {**facts, "rows": self.rows}, trees)

    def _greet(self, hello: Hello) -> None:
        check_hello(hello, self._schema)
        if hello.name not in self._hellos and len(self._hellos) == self.clients:
            raise WireError(f"'{hello.name}' is not one of the {self.clients} clients of this run; all have come")
        self._hellos[hello.name] = hello
        if self.server is None and len(self._hellos) == self.clients:
            self._begin()

    def _begin(self) -> None:
        model, method, work, options = self._made_of
        self.server, self._welcomes = found(list(self._hellos.values()), model, method, work, **options)
        if self.path.exists():
            facts, trees = load(self.path)
            self.rows = facts.pop("rows")
            self.server.load(facts, trees)

    def _answers(self, name: str) -> list[Message]:
        if self.server is None or name not in self._welcomes:
            return [Refusal(WAIT), Refusal(WAIT)]
        welcome = self._welcomes[name]
        return [welcome, self.server.requests().get(welcome.client) or Refusal(WAIT)]
