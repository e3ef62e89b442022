"""The server's half where clients come one by one: each is sent the model of now, and its update taken when it comes.

`dispatch` gives a client a job, which is a `Request` like any other, and `take` takes its `Update`; the clients' half
is the same as in rounds. A strategy says when updates make the next version of the model. What was sent to a client is
kept while it works, since its update is the way it went from there. `state` and `load` are all that a restart needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fednorm.core.method import Phase, Progress
from fednorm.core.phases import PhaseId, Purpose
from fednorm.core.report import Report
from fednorm.core.state import Entry, Tree
from fednorm.core.strategy import Context, Memory, Strategy
from fednorm.errors import ConfigError, WireError
from fednorm.halves.agreed import Agreed
from fednorm.halves.exchange import Held
from fednorm.halves.guard import Allowed, Sent, flaw_of_form, flaws
from fednorm.halves.landing import Arrival, Flight, Landing, Reviser, context_of
from fednorm.halves.messages import Address, Request, Terms, Update
from fednorm.halves.norm_bound import NORM_FACTOR, Moved
from fednorm.halves.prepared_phase import PreparedPhase
from fednorm.halves.recent import Recent, moved_by
from fednorm.halves.server import Row
from fednorm.halves.terms import with_uniform
from fednorm.halves.versions import Landed, next_version
from fednorm.halves.wire import check_answer
from fednorm.halves.wire_format import short
from fednorm.strategies.joining import refuse_rounds

OVER = "the run is over"


class ArrivalServer:
    """A run of a method under a strategy, as the server sees it; a round of the work is a version of the model."""

    def __init__(
        self,
        agreed: Agreed,
        clients: Sequence[int],
        strategy: Strategy,
        *,
        norm_factor: float | None = NORM_FACTOR,
        keep_reported: bool = True,
        terms: Terms | None = None,
        sizes: Mapping[int, int] | None = None,
        context: Context | None = None,
        held: Held | None = None,
    ) -> None:
        refuse_rounds(agreed.method)
        self.agreed, self.clients, self.strategy = agreed, clients, strategy
        self.norm_factor = norm_factor
        self.terms, self.sizes = terms, sizes
        self.held = held or Held(agreed.initial())
        self.version = 0
        """versions of the model that were made"""
        self.stage = 0
        self.switch_memory: dict[str, Any] = {}
        self.reports: Sequence[Report] = ()
        """of the last version: what the switch looks at"""
        self.reported: dict[int, Tree] = {}
        """the last entries of each client that are reported and not merged, unless they are kept elsewhere"""
        self._keep_reported = keep_reported
        self.row: Row = {}
        """what is known of the version under way"""
        self.reviser: Reviser | None = None
        if strategy.revise is not None:
            known = context or context_of(agreed, clients)
            self.reviser = Reviser(strategy.revise, known, strategy.revise.begin(known))
        self.flights: dict[int, Flight] = {}
        """jobs under way, by number"""
        self.buffer: list[Landed] = []
        """updates that were taken and are not merged yet, in the order they came"""
        self.number = 1
        """of the next job"""
        self.accepted: dict[int, int] = {}
        """the last job of each client that was taken"""
        self._bases: dict[int, Tree] = {}
        """trees of versions that somebody began at"""
        self._recent = Recent()
        self._decided = 0
        self._rules: dict[PhaseId, Phase] = {}

    # -- decide --

    @property
    def tree(self) -> Tree:
        return self.held.tree

    @property
    def finished(self) -> bool:
        return self.version == self.agreed.work.rounds

    @property
    def busy(self) -> set[int]:
        """Clients that have a job."""
        return {flight.client for flight in self.flights.values()}

    def base(self, version: int) -> Tree:
        """The tree of a version that somebody began at, or of the present one."""
        return self.tree if version == self.version else self._bases[version]

    def begin(self, client: int, *, overlapping: bool = False) -> Flight:
        """Give a client a job; `overlapping` where it may have another, whose update is on its way."""
        if self.finished:
            raise WireError(f"{OVER}; nothing is asked any more")
        if client not in self.clients:
            raise WireError(f"there is no client {short(client)} in this run")
        alone = "client_state" in self.agreed.method.needs or not overlapping
        if alone and (other := self._job_of(client)) is not None:
            raise WireError(f"it has job {other.number} already; take its update, or give it up", client=client)
        self._decide()
        flight = Flight(self.number, client, self.version, PhaseId(Purpose.TRAIN, self.stage))
        self.number += 1
        self.flights[flight.number] = flight
        self._bases[self.version] = self.tree
        self.row["bytes_down"] += self.agreed.phase(flight.phase).cost.down
        return flight

    def _decide(self) -> None:
        """Decide the stage of the version under way, once."""
        number = self.version + 1
        if self._decided == number:
            return
        method, work = self.agreed.method, self.agreed.work
        self.switch_memory, self.stage = method.switch(self.switch_memory, Progress(number, work.rounds), self.reports)
        self._decided = number
        lr = self.agreed.numbers(PhaseId(Purpose.TRAIN, self.stage), number)["lr"]
        self.row = {"round": number, "stage": self.stage, "clients": 0, "exchanges": 0, "bytes_up": 0, "bytes_down": 0}
        self.row["lr"] = lr

    def numbers(self, flight: Flight) -> Mapping[str, float]:
        """The numbers of a job's steps: those of the version that it was to be part of when it began."""
        return self.agreed.numbers(flight.phase, flight.version + 1)

    def give_up(self, client: int) -> Row | None:
        """Forget the jobs of a client that is gone; what it may still send is late.

        Under a barrier, which waits for all, the version may be complete without it: then this is its row.
        """
        for flight in [flight for flight in self.flights.values() if flight.client == client]:
            del self.flights[flight.number]
        self._forget_bases()
        return self._merge() if self._is_full else None

    def _job_of(self, client: int) -> Flight | None:
        return next((flight for flight in self.flights.values() if flight.client == client), None)

    # -- over a wire --

    def dispatch(self, client: int) -> Request:
        """Give a client a job: what to send it.

        Who sends it must have the state on disk first: what clients build on must not be lost.
        """
        return self._request(self.begin(client))

    def request(self, client: int) -> Request | None:
        """The request of the job that a client has, again, for one that was started anew; None without a job."""
        flight = self._job_of(client)
        return None if flight is None else self._request(flight)

    def _request(self, flight: Flight) -> Request:
        phase, base = self.agreed.phase(flight.phase), self.base(flight.version)
        return Request(
            client=flight.client,
            address=self._address(flight.number),
            round=flight.version + 1,
            phase=flight.phase,
            numbers=self.numbers(flight),
            accepted=self.accepted.get(flight.client, 0),
            tree={key: base[key] for key in phase.sent},
        )

    def take(self, update: Update) -> Arrival:
        """Take a client's update. A late, foreign or altered one is refused with an error, and its job stays open."""
        client = getattr(getattr(update, "report", None), "client", None)
        if type(update) is not Update or type(client) is not int:
            raise WireError(f"it is {short(update)} of client {short(client)}, expected an update")
        flight = self._job_of(client)
        if flight is None:
            raise WireError("it has no job; its answer was ignored", client=client)
        check_answer(update, self._address(flight.number))
        phase = self.agreed.phase(flight.phase)
        flaw = flaw_of_form(update, Sent.by(phase.schema), phase.phase.measures, self._allowed(phase, client))
        if flaw is not None:
            raise WireError(flaw.why, client=client, exchange=flight.number, entry=flaw.entry or None)
        (arrival,) = self.land([Landing(flight.number, update)])
        return arrival

    def _allowed(self, phase: PreparedPhase, client: int) -> Allowed | None:
        """What the terms allow a client to say of itself."""
        return None if self.sizes is None else Allowed.by_terms(phase, self.agreed.work, self.sizes[client])

    def _address(self, number: int) -> Address:
        if self.terms is None:
            raise ConfigError("this server has no terms; make it with `found_arrivals`")
        return Address(terms=self.terms.digest, number=number)

    # -- merge --

    def land(self, landings: Sequence[Landing]) -> Iterator[Arrival]:
        """Take updates that came at one instant, in this order, one whenever the next is asked for.

        Whenever the buffer is full, what is in it makes a version; under a barrier the last of those under way does it.
        """
        refused = self._refused(landings)
        for each in landings:
            yield self._landed(each, refused.get(each.number, ""))

    def _refused(self, landings: Sequence[Landing]) -> dict[int, str]:
        """Why updates cannot be used, by job."""
        refused: dict[int, str] = {}
        moved: dict[int, Moved] = {}
        entries: dict[str, Entry] = {}
        for each in landings:
            looked = each if each.looked else self._looked_at(each)
            if looked.why:
                refused[each.number] = looked.why
            elif looked.moved is not None:
                moved[each.number] = looked.moved
                entries |= self._entries(self.agreed.phase(self.flights[each.number].phase))
        return refused | self._recent.refused(moved, self.tree, entries, self.norm_factor)

    def _looked_at(self, each: Landing) -> Landing:
        """An update with what is wrong with its values, and how far it went."""
        flight = self.flights[each.number]
        phase, base = self.agreed.phase(flight.phase), self.base(flight.version)
        if each.update is None:
            return each
        allowed = self._allowed(phase, flight.client)
        caps = {} if allowed is None else {flight.client: allowed}
        (why,) = flaws([each.update], phase.schema, measures=phase.phase.measures, allowed=caps, server=base)
        if why or not self.norm_factor:
            return replace(each, why=why or "")
        return replace(each, moved=moved_by([each.update.shared], [base], self._entries(phase))[0])

    @staticmethod
    def _entries(phase: PreparedPhase) -> dict[str, Entry]:
        return {key: phase.schema[key][0] for key in phase.shared}

    def _landed(self, each: Landing, why: str) -> Arrival:
        flight = self.flights.pop(each.number)
        staleness = self.version - flight.version
        if self.finished:
            return Arrival(flight.client, flight.number, staleness, self.version, OVER)
        self._decide()
        phase, update = self.agreed.phase(flight.phase), each.update
        if why or update is None:
            self.row["refused"] = {**self.row.get("refused", {}), flight.client: why}
        else:
            self.buffer.append(Landed(flight.number, flight.version, flight.phase, update))
            self.row["bytes_up"] += phase.cost.up
            if phase.kept or phase.phase.consumes_batches:
                self.accepted[flight.client] = flight.number
            if update.reported and self._keep_reported:
                self.reported[flight.client] = update.reported
        row = self._merge() if self._is_full else None
        return Arrival(flight.client, flight.number, staleness, self.version, why, row)

    @property
    def _is_full(self) -> bool:
        """Whether what is in the buffer makes a version."""
        if self.strategy.barrier:
            return bool(self.buffer) and not self.flights
        return len(self.buffer) == self.strategy.buffer

    def _merge(self) -> Row:
        """The next version, of what is in the buffer."""
        phase = self.agreed.phase(PhaseId(Purpose.TRAIN, self.stage))
        rules = self._rules.setdefault(
            phase.id, with_uniform(phase.phase) if self.strategy.weights == "uniform" else phase.phase
        )
        bases = {each.version: self.base(each.version) for each in self.buffer}
        self.held.tree, self.held.memory = next_version(
            self.strategy,
            phase,
            rules,
            self.tree,
            self.held.memory,
            self.version,
            self.buffer,
            bases,
            self.reviser,
        )
        ordered = sorted(self.buffer, key=lambda each: each.client)
        row, self.reports = self.row, [each.update.report for each in ordered]
        row |= {"clients": len(ordered), "exchanges": phase.cost.exchanges}
        row["cohort"] = [each.client for each in ordered]
        row["staleness"] = [self.version - each.version for each in ordered]
        self.buffer, self.row = [], {}
        self.version += 1
        self._forget_bases()
        if not self.finished:
            self._decide()
        return row

    def _forget_bases(self) -> None:
        """Keep the trees that somebody still builds on."""
        needed = {flight.version for flight in self.flights.values()} | {each.version for each in self.buffer}
        self._bases = {version: tree for version, tree in self._bases.items() if version in needed}

    # -- restart --

    def state(self) -> tuple[dict[str, Any], dict[str, Tree]]:
        """All that a restart needs: JSON values, and trees of tensors."""
        facts: dict[str, Any] = {
            "terms": self.terms.digest if self.terms else "",
            "strategy": self.strategy.name,
            "version": self.version,
            "stage": self.stage,
            "switch": self.switch_memory,
            "reports": [vars(report) for report in self.reports],
            "row": self.row,
            "decided": self._decided,
            "number": self.number,
            "accepted": {str(client): number for client, number in self.accepted.items()},
            "flights": [[*flight[:3], str(flight.phase)] for flight in self.flights.values()],
            "buffer": [[each.number, each.version, str(each.phase), vars(each.update.report)] for each in self.buffer],
            "recent": self._recent.facts(),
        }
        trees = {"model": self.tree, "memory": self.held.memory}
        trees |= {f"{_BASE}{version}": tree for version, tree in self._bases.items() if version != self.version}
        for each in self.buffer:
            trees |= {f"{_SHARED}{each.number}": each.update.shared, f"{_TOLD}{each.number}": each.update.reported}
        trees |= {f"{_REPORTED}{client}": tree for client, tree in self.reported.items()}
        if self.reviser is not None:
            facts["remembered"], trees["remembered"] = self.reviser.memory
        return facts, trees

    def load(self, facts: Mapping[str, Any], trees: Mapping[str, Tree]) -> None:
        """Go on from what `state` gave."""
        if facts.get("terms", "") != (self.terms.digest if self.terms else ""):
            raise WireError("the stored state is of other terms; start the run anew, or with what it was begun with")
        if facts["strategy"] != self.strategy.name:
            raise WireError(
                f"the stored state is of '{facts['strategy']}', this run of '{self.strategy.name}'; give the same"
            )
        self.version, self.stage, self.switch_memory = facts["version"], facts["stage"], facts["switch"]
        self.reports = [Report(**report) for report in facts["reports"]]
        self.row, self._decided, self.number = dict(facts["row"]), facts["decided"], facts["number"]
        if "refused" in self.row:
            self.row["refused"] = {int(client): why for client, why in self.row["refused"].items()}
        self.accepted = {int(client): number for client, number in facts["accepted"].items()}
        self.flights = {
            number: Flight(number, client, version, PhaseId.parse(phase))
            for number, client, version, phase in facts["flights"]
        }
        self._recent.load(facts["recent"])
        self.held.tree, self.held.memory = dict(trees["model"]), dict(trees.get("memory", {}))
        self._bases = {int(name.removeprefix(_BASE)): tree for name, tree in trees.items() if name.startswith(_BASE)}
        self._bases[self.version] = self.held.tree
        self.buffer = [
            Landed(
                number,
                version,
                PhaseId.parse(phase),
                Update(Report(**report), trees[f"{_SHARED}{number}"], trees.get(f"{_TOLD}{number}", {})),
            )
            for number, version, phase, report in facts["buffer"]
        ]
        self.reported = {
            int(name.removeprefix(_REPORTED)): tree for name, tree in trees.items() if name.startswith(_REPORTED)
        }
        if self.reviser is not None:
            self.reviser.memory = Memory(facts["remembered"], trees.get("remembered", {}))


_BASE, _SHARED, _TOLD, _REPORTED = "base ", "buffer ", "buffer reported ", "reported "
