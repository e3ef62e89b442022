"""The server's half of a method: it decides what is asked, checks and merges what comes, and has no data.

A run is a series of exchanges, each with a number. `open` says which one is due; once its answers are there they are
admitted, merged and noted, which opens the next. An engine may do the merging inside a program of its own. Over a wire
`requests`, `take` and `close` do the same with messages; `state` and `load` are all that a restart needs.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from fednorm.core.method import Progress
from fednorm.core.phases import PhaseId, Purpose
from fednorm.core.report import Report
from fednorm.core.state import Tree
from fednorm.data.batches import UNION
from fednorm.data.federation import called
from fednorm.errors import ConfigError, QuorumError, WireError
from fednorm.halves.admission import admitted
from fednorm.halves.agreed import Agreed
from fednorm.halves.exchange import Exchange, Held, Holder, diverged, drawn_cohort
from fednorm.halves.guard import Allowed, Sent, flaw_of_form
from fednorm.halves.merging import merge_updates
from fednorm.halves.messages import Address, Request, Scores, Terms, Update
from fednorm.halves.norm_bound import NORM_FACTOR
from fednorm.halves.prepared_phase import PreparedPhase
from fednorm.halves.stacks import Stacks
from fednorm.halves.wire import check_answer
from fednorm.halves.wire_format import short

log = logging.getLogger("fednorm.server")
DID_NOT_ANSWER = "it did not answer"
_ROUNDING = 1e-9
Row = dict[str, Any]


class Server:
    """A run of a method, as the server sees it."""

    def __init__(
        self,
        agreed: Agreed,
        clients: Sequence[int],
        *,
        per_round: int | None = None,
        quorum: float | None = None,
        retries: int = 0,
        norm_factor: float | None = NORM_FACTOR,
        score_every: int | None = None,
        held: Holder | None = None,
        keep_reported: bool = True,
        terms: Terms | None = None,
        sizes: Mapping[int, int] | None = None,
    ) -> None:
        self.agreed = agreed
        self.clients = clients
        self.per_round = min(per_round or len(clients), len(clients))
        self.quorum = quorum
        self.retries, self.norm_factor = retries, norm_factor
        self.score_every = score_every
        self.held = held or Held(agreed.initial())
        self.reported: dict[int, Tree] = {}
        """the last entries of each client that are reported and not merged, unless they are kept elsewhere"""
        self.keeps_reported = keep_reported
        self.terms = terms
        self.sizes = sizes
        self.names: Sequence[str] = ()
        """of the clients, for texts, where they have some"""
        self.round = 0
        """rounds that are over"""
        self.stage = 0
        self.switch_memory: dict[str, Any] = {}
        self.reports: Sequence[Report] = ()
        """of the last training exchange: what the switch looks at"""
        self.row: Row = {}
        """what is known of the round that is open, or of the last one"""
        self.scores: dict[int, Scores] = {}
        self._number, self._attempt = 1, 1
        self._step = 0
        self._decided = 0
        """the round whose stage is decided"""
        self._aside: tuple[Tree, Tree] | None = None
        """tree and memory as training left them, while a query's statistics are in their place"""
        self._accepted: dict[int, int] = {}
        self._drawn: tuple[int | None, list[int]] = None, []
        """a round and its cohort"""
        self._open: Exchange | None = None
        self._taken: dict[int, Update] = {}
        self.turned_away: dict[int, str] = {}
        """why the last answer of a client could not be taken"""

    # -- decide --

    @property
    def tree(self) -> Tree:
        return self.held.tree

    @property
    def finished(self) -> bool:
        return self.round == self.agreed.work.rounds

    def open(self) -> Exchange | None:
        """The exchange that is due; None once the run is over."""
        if self._open is None and not self.finished:
            number = self.round + 1
            if self._decided < number:
                self._begin_round(number)
            id = self._exchanges(number)[self._step]
            if id.purpose is Purpose.QUERY and number < self.agreed.work.rounds and self._aside is None:
                self._aside = _copy(self.held.tree), _copy(self.held.memory)
            if id.purpose is Purpose.SCORE:
                self.scores = {}
            phase = self.agreed.phase(id)
            numbers = {} if id.purpose is Purpose.SCORE else self.agreed.numbers(id, number)
            self._open = Exchange(self._number, self._attempt, number, phase, self.cohort(number, phase), numbers)
        return self._open

    def _begin_round(self, number: int) -> None:
        method, rounds = self.agreed.method, self.agreed.work.rounds
        self.switch_memory, self.stage = method.switch(self.switch_memory, Progress(number, rounds), self.reports)
        self._decided = number
        cohort = self.cohort(number, self.agreed.phase(PhaseId(Purpose.TRAIN, self.stage)))
        self.row = {"round": number, "stage": self.stage, "clients": len(cohort)}
        self.row |= dict.fromkeys(("exchanges", "bytes_up", "bytes_down"), 0)
        if len(cohort) < len(self.clients) and method.data == "each":
            self.row["cohort"] = list(cohort)
        last = PhaseId(Purpose.TRAIN, self.stage, len(method.stages[self.stage]) - 1)
        self.row["lr"] = self.agreed.numbers(last, number)["lr"]

    def _exchanges(self, number: int) -> list[PhaseId]:
        """The exchanges of a round, in order."""
        method, last = self.agreed.method, number == self.agreed.work.rounds
        ids = [PhaseId(Purpose.TRAIN, self.stage, index) for index in range(len(method.stages[self.stage]))]
        if last:
            ids += [PhaseId(Purpose.FINISH, 0, index) for index in range(len(method.finish))]
        if self.score_every and (last or number % self.score_every == 0):
            ids += [PhaseId(Purpose.QUERY)] * (method.query is not None)
            ids.append(PhaseId(Purpose.SCORE, self.stage))
        elif last and method.query is not None:
            ids.append(PhaseId(Purpose.QUERY))
        return ids

    def cohort(self, round: int, phase: PreparedPhase) -> Sequence[int]:
        """Who takes part in a phase, ascending: a keyed draw for training, else everybody, or the union as one."""
        if self.agreed.method.sees_union(phase.phase):
            return [UNION]
        if phase.id.purpose is not Purpose.TRAIN or self.per_round == len(self.clients):
            return list(self.clients)
        if self._drawn[0] != round:  # once a round, though every one of its exchanges asks
            self._drawn = round, drawn_cohort(self.agreed.work.seed, round, self.clients, self.per_round)
        return self._drawn[1]

    # -- merge --

    @property
    def tolerates(self) -> bool:
        """Whether a client that fails may not be the end of the run."""
        return self.quorum is not None or self.retries > 0

    def admit(
        self, usable: Collection[int], refused: Mapping[int, str], missing: Mapping[int, str] | None = None
    ) -> bool:
        """Go on without clients that cannot be used, whose own state is not advanced either, or end the run.

        `refused` and `missing` say why of those whose update was bad, or never came; whoever else of the cohort is not
        `usable` did not answer. False where too few remain, and those that are not usable are to be asked again.
        """
        exchange = self._opened()
        why = {**refused, **(missing or {})}
        left = {client: why.get(client, DID_NOT_ANSWER) for client in exchange.cohort if client not in usable}
        asked, there = len(exchange.cohort), len(exchange.cohort) - len(left)
        if left and (self.quorum is None or not there or there < self.quorum * asked - _ROUNDING):
            if self._attempt <= self.retries:
                self._attempt += 1
                self.row["retried"] = self.row.get("retried", 0) + 1
                return False
            client = next((client for client in left if client in refused), next(iter(left)))
            where = f"round {exchange.round}, {called(client, self.names)}: {left[client]}"
            if self.quorum is None and client in refused:
                raise diverged(exchange.round, where)
            if self.quorum is None:
                raise QuorumError(f"{where}; ask it again, or give a quorum to go on without it")
            raise QuorumError(f"{there} of {asked} updates usable in {where}; engine.quorum={self.quorum} needs more")
        if left:
            self.row["refused"] = {**self.row.get("refused", {}), **left}
        return True

    def merge(
        self, updates: Sequence[Update], reports: Sequence[Report] | None = None, stacks: Stacks | None = None
    ) -> None:
        """Merge what clients sent; `reports` are the whole cohort's where the updates are one process's part of it."""
        phase = self._opened().phase
        self.held.tree, self.held.memory = merge_updates(
            phase.phase, self.held.tree, updates, phase.schema, self.held.memory, reports, stacks
        )
        for update in updates:
            if update.reported and self.keeps_reported:
                self.reported[update.client] = update.reported

    # -- note --

    def note(
        self,
        reports: Sequence[Report],
        probed: Mapping[int, Mapping[str, float]] | None = None,
        joined: Mapping[str, float] | None = None,
    ) -> None:
        """Take down what an exchange was, after its merge, and go on to the next; `reports` are of accepted updates."""
        exchange = self._opened()
        if exchange.purpose is Purpose.TRAIN:
            self.reports = reports
        charged = exchange.purpose is not Purpose.QUERY or exchange.round == self.agreed.work.rounds
        if charged:  # a query before a test in mid-run is the study's own cost
            cost = exchange.phase.cost
            self.row["exchanges"] += cost.exchanges
            self.row["bytes_down"] += cost.down * len(exchange.cohort)
            self.row["bytes_up"] += cost.up * len(reports)
        if probed is not None:
            self.row.setdefault("probes", {})[exchange.phase.phase.name] = dict(probed)
        if joined:
            self.row.setdefault("round_probes", {})[exchange.phase.phase.name] = dict(joined)
        self._go_on()

    def note_scores(self) -> None:
        """Go on after a test; statistics of a query give way again, except after the last round."""
        if self._aside is not None:
            self.held.tree, self.held.memory = self._aside
        self._aside = None
        self._go_on()

    def _go_on(self) -> None:
        exchange = self._opened()
        self._open, self._taken, self.turned_away = None, {}, {}
        self._number, self._attempt, self._step = self._number + 1, 1, self._step + 1
        if self._step == len(self._exchanges(exchange.round)):
            self.round, self._step = exchange.round, 0

    def _opened(self) -> Exchange:
        exchange = self.open()
        if exchange is None:
            raise WireError("the run is over; nothing is asked any more")
        return exchange

    # -- over a wire --

    def requests(self) -> dict[int, Request]:
        """What clients of the open exchange that have not answered are to be asked; empty once the run is over.

        Who sends them must have the state on disk first: what clients build on must not be lost.
        """
        exchange = self.open()
        if exchange is None:
            return {}
        tree, address = {key: self.held.tree[key] for key in exchange.phase.sent}, self._address()
        return {
            client: Request(
                client=client,
                address=address,
                round=exchange.round,
                phase=exchange.phase.id,
                numbers=exchange.numbers,
                accepted=self._accepted.get(client, 0),
                tree=tree,
            )
            for client in self.missing
        }

    def take(self, answer: Update | Scores) -> bool:
        """Take a client's answer; False for one that came already. A late, foreign or altered one is refused."""
        exchange = self._opened()
        wanted = Scores if exchange.purpose is Purpose.SCORE else Update
        client = getattr(getattr(answer, "report", answer), "client", None)
        if type(client) is not int:
            raise WireError(f"it is of client {short(client)}; a client is a whole number", exchange=exchange.number)
        if client not in exchange.cohort or type(answer) is not wanted:
            raise WireError(
                f"exchange {exchange.number} ({exchange.phase.id}) asked it for no {type(answer).__name__.lower()}; "
                "its answer was ignored",
                client=client,
                exchange=exchange.number,
            )
        check_answer(answer, self._address())
        if isinstance(answer, Update):
            allowed = self._allowed(exchange, [client]).get(client)
            flaw = flaw_of_form(answer, Sent.by(exchange.phase.schema), exchange.phase.phase.measures, allowed)
            if flaw is not None:
                self.turned_away[client] = str(flaw)
                raise WireError(flaw.why, client=client, exchange=exchange.number, entry=flaw.entry or None)
        if client not in self.missing:
            log.info("client %d answered exchange %d twice; the second answer is ignored", client, exchange.number)
            return False
        if isinstance(answer, Scores):
            self.scores[client] = answer
            return True
        self._taken[client] = answer
        return True

    def _allowed(self, exchange: Exchange, clients: Iterable[int]) -> dict[int, Allowed]:
        """What the terms allow clients to say of themselves."""
        sizes, work = self.sizes, self.agreed.work
        return {} if sizes is None else {c: Allowed.by_terms(exchange.phase, work, sizes[c]) for c in clients}

    @property
    def missing(self) -> list[int]:
        """Clients of the open exchange that have not answered."""
        answered = self.scores if self._opened().purpose is Purpose.SCORE else self._taken
        return [client for client in self._opened().cohort if client not in answered]

    def close(self) -> None:
        """Merge what was taken and go on; clients that did not answer count as refused.

        Where too few remain and `retries` allows it, the exchange is begun again instead.
        """
        exchange = self._opened()
        missing = {client: self.turned_away.get(client, DID_NOT_ANSWER) for client in self.missing}
        if exchange.purpose is Purpose.SCORE:
            if not self.admit(self.scores, {}, missing):
                self._begin_again()
                return
            self.row["sums"] = {client: self.scores[client].as_lists() for client in sorted(self.scores)}
            self.note_scores()
            return
        updates = [self._taken[client] for client in sorted(self._taken)]
        usable, stacks, refused = admitted(
            exchange.phase, updates, self.held.tree, self._allowed(exchange, self._taken), self.norm_factor
        )
        if not self.admit([update.client for update in usable], refused, missing):
            self._begin_again()
            return
        self.merge(usable, stacks=stacks)
        if exchange.keeps and (exchange.phase.kept or exchange.phase.phase.consumes_batches):
            self._accepted |= {update.client: exchange.number for update in usable}
        self.note([update.report for update in usable])

    def retry(self) -> None:
        """Begin the open exchange again, such as when too few answered in time; what was taken of it is dropped."""
        self._opened()
        self._attempt += 1
        self._begin_again()

    def _begin_again(self) -> None:
        self._open, self._taken, self.turned_away, self.scores = None, {}, {}, {}

    def _address(self) -> Address:
        if self.terms is None:
            raise ConfigError("this server has no terms; make it with `found`")
        return Address(terms=self.terms.digest, number=self._number, attempt=self._attempt)

    def state(self) -> tuple[dict[str, Any], dict[str, Tree]]:
        """All that a restart needs: JSON values, and trees of tensors."""
        facts = {
            "terms": self.terms.digest if self.terms else "",
            "round": self.round,
            "stage": self.stage,
            "switch": self.switch_memory,
            "reports": [vars(report) for report in self.reports],
            "row": self.row if self._step else {},
            "number": self._number,
            "attempt": self._attempt,
            "step": self._step,
            "decided": self._decided,
            "accepted": {str(client): number for client, number in self._accepted.items()},
            "held": dict(self.held.facts),
        }
        trees = {"model": self.held.tree, "memory": self.held.memory}
        if self._aside is not None:
            trees |= {"aside": self._aside[0], "aside_memory": self._aside[1]}
        for client, tree in self.reported.items():
            trees[f"{_REPORTED}{client}"] = tree
        return facts, trees

    def load(self, facts: Mapping[str, Any], trees: Mapping[str, Tree] | None = None) -> None:
        """Go on from what `state` gave; without trees, those that are held stay."""
        if facts.get("terms", "") != (self.terms.digest if self.terms else ""):
            raise WireError("the stored state is of other terms; start the run anew, or with what it was begun with")
        self.round, self.switch_memory = facts["round"], facts["switch"]
        self.reports = [Report(**report) for report in facts["reports"]]
        self.stage, self.row = facts.get("stage", 0), dict(facts.get("row", {}))
        self._number, self._attempt = facts.get("number", 1), facts.get("attempt", 1)
        self._step, self._decided = facts.get("step", 0), facts.get("decided", self.round)
        self._accepted = {int(client): number for client, number in facts.get("accepted", {}).items()}
        self._open, self._taken, self.turned_away = None, {}, {}
        self.held.facts = facts.get("held", {})
        if trees is None:
            return
        self.held.tree, self.held.memory = dict(trees["model"]), dict(trees["memory"])
        self._aside = (trees["aside"], trees["aside_memory"]) if "aside" in trees else None
        self.reported = {
            int(name.removeprefix(_REPORTED)): tree for name, tree in trees.items() if name.startswith(_REPORTED)
        }


_REPORTED = "reported "


def _copy(tree: Tree) -> Tree:
    return {key: value.clone() for key, value in tree.items()}
