"""Clients that come one by one, in virtual time: who is sent the model when, and whose update arrives next.

What a client brings depends only on what it was sent. So nobody trains before the first update is due that was not
trained yet, and then all do that are under way where the engine stacks them, else some. Nothing is drawn that is not a
function of the seed, the job and the client, so the clock, the jobs under way and the server's state are all there is
to save. Updates that were trained and have not arrived are trained again after a restart, unless their bits depend on
who is trained along.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from fednorm.core.phases import PhaseId, Purpose
from fednorm.core.state import Tree
from fednorm.engines.base import ClientStates, Engine
from fednorm.engines.clock.queue import Queue, UnderWay
from fednorm.engines.clock.schedule import Schedule
from fednorm.engines.clock.trained import Trained, restored, stored
from fednorm.engines.receiving import flaws_of_outcomes, received
from fednorm.engines.tolerance import Failure, one_by_one
from fednorm.errors import ConfigError
from fednorm.halves.arrivals import ArrivalServer
from fednorm.halves.exchange import drawn_client, drawn_cohort
from fednorm.halves.landing import Arrival, Flight, Landing
from fednorm.halves.norm_bound import Moved
from fednorm.halves.prepared_phase import PreparedPhase
from fednorm.halves.recent import moved_by, moved_in_stack
from fednorm.halves.site import Sites, state_after
from fednorm.halves.stacks import Stacks
from fednorm.halves.training import Job, Outcome, Together

_WAVES = 4
"""Jobs for each process at a time where clients are not stacked, so that few wait for the slowest."""


@dataclass(frozen=True)
class InTraining:
    """Jobs of different clients that are trained together, by client."""

    phase: PreparedPhase
    under_way: Mapping[int, UnderWay]
    jobs: Mapping[int, Job]
    outcomes: Iterator[Outcome | Failure]


@dataclass
class Asked:
    """Jobs, by number, whose training was asked for before any of them was due."""

    numbers: frozenset[int]
    training: InTraining | None
    """None once somebody looked at what it brought, as a checkpoint does"""


class Simulation:
    """A server whose clients live in virtual time."""

    def __init__(
        self,
        server: ArrivalServer,
        sites: Sites,
        engine: Engine,
        states: ClientStates,
        schedule: Schedule,
        *,
        concurrency: int,
        tolerant: bool = False,
    ) -> None:
        self.server, self.sites, self.engine, self.states = server, sites, engine, states
        self.schedule, self.concurrency = schedule, concurrency
        if not 1 <= concurrency <= len(server.clients):
            raise ConfigError(
                f"concurrency={concurrency} is out of range; {len(server.clients)} clients train, give 1 to that many"
            )
        self.time = 0.0
        """of the last arrival"""
        self._train = one_by_one(engine.train, sites.prepared.name) if tolerant else engine.train
        self._alone = "client_state" in sites.method.needs
        self._queue = Queue()
        self._trained: dict[int, Trained] = {}
        self._asked: list[Asked] = []
        """of which none was due yet; a checkpoint leaves them, since who is trained next depends on them"""

    def advance(self) -> Iterator[Arrival]:
        """Send the model to idle clients, then take what arrives at the next instant, update by update.

        All that arrives at an instant is taken before anybody is sent anything.
        """
        if self.server.finished:
            return
        if not self._queue or self._queue.first > self.time:
            self._dispatch()
        self._ask_early()
        due = self._queue.due()
        numbers = {each.flight.number for each in due}
        if numbers & self._untrained:
            self._ask_for(due)
        while any(numbers & asked.numbers for asked in self._asked):
            self._ask_early(waiting=True)
            self._receive(self._asked.pop(0))
        self.time = self._queue.first
        landings = self.server.land([self._trained[each.flight.number].landing for each in due])
        for each, arrival in zip(due, landings, strict=False):
            self._queue.take(each)
            trained = self._trained.pop(each.flight.number)
            if not arrival.refused:
                self._keep(each, trained)
            yield arrival
            if self.server.finished:  # nobody waits for the others
                return

    # -- dispatch --

    def _dispatch(self) -> None:
        """Fill the places that are free: under a barrier all at once, once all are."""
        server = self.server
        if server.strategy.barrier:
            if not self._queue:
                number = server.version + 1
                for client in drawn_cohort(server.agreed.work.seed, number, server.clients, self.concurrency):
                    self._send(client)
            return
        while len(self._queue) < self.concurrency:
            self._send(self._chosen())

    def _chosen(self) -> int:
        """One of the clients that have nothing to do, each as likely."""
        server = self.server
        busy = self._queue.busy(None if self._alone else self.time)
        return drawn_client(server.agreed.work.seed, server.number, server.clients, busy)

    def _send(self, client: int) -> None:
        server = self.server
        used = self.states.get_many([client])[client].steps
        used += sum(self._steps(each.flight) for each in self._queue.of(client))  # these batches are gone
        flight = server.begin(client, overlapping=not self._alone)
        times = self.schedule.times(server.agreed.work.seed, client, flight.number)
        free = self.time + times.download + times.compute
        self._queue.add(UnderWay(flight, free + times.upload, free, used))

    def _steps(self, flight: Flight) -> int:
        phase = self.sites.phase(flight.phase)
        return self.sites.num_steps(flight.client, phase) if phase.phase.consumes_batches else 0

    # -- train --

    @property
    def _untrained(self) -> set[int]:
        """Jobs under way whose training nobody asked for."""
        begun = {each.flight.number for each in self._queue.begun()}
        return begun.difference(self._trained, *(asked.numbers for asked in self._asked))

    def _ask_early(self, waiting: bool = False) -> None:
        """Let an engine that works on meanwhile begin what is enough for it; where all else waits, half is enough."""
        phase = self.sites.phase(PhaseId(Purpose.TRAIN, self.server.stage))
        enough = self.engine.ahead(phase) >> waiting
        if not enough or self.server.strategy.barrier or len(self._queue) - len(self._trained) < enough:
            return
        coming = self._waiting(self._needed())
        if len(coming) >= enough:
            self._ask(coming[:enough])

    def _ask_for(self, due: Sequence[UnderWay]) -> None:
        """Train those that are under way and were not yet, but those that cannot come before the run is over."""
        untrained = self._waiting(max(len(due), self._needed()))
        if not self.server.strategy.barrier:
            least = sum(each.arrives == due[0].arrives for each in untrained)
            untrained = untrained[: max(least, self._enough(len(untrained)))]
        self._ask(untrained)

    def _waiting(self, most: int) -> list[UnderWay]:
        """Of so many that arrive next, those whose training nobody asked for."""
        untrained = self._untrained
        return [each for each in self._queue.coming()[:most] if each.flight.number in untrained]

    def _ask(self, some: Sequence[UnderWay]) -> None:
        groups: dict[PhaseId, list[dict[int, UnderWay]]] = {}
        for each in sorted(some, key=lambda each: each.flight.number):
            rows = groups.setdefault(each.flight.phase, [])
            client = each.flight.client
            # An engine tells outcomes apart by their clients, and one may have two jobs.
            row = next((row for row in rows if client not in row), None)
            if row is None:
                rows.append({client: each})
            else:
                row[client] = each
        for id, rows in groups.items():
            phase = self.sites.phase(id)
            for row in rows:
                row = dict(sorted(row.items()))  # as outcomes are looked at, which may be rows of a stack
                jobs = self._jobs(phase, row)
                outcomes = self._train(phase, list(jobs.values()), False)
                asked = frozenset(each.flight.number for each in row.values())
                self._asked.append(Asked(asked, InTraining(phase, row, jobs, outcomes)))

    def _enough(self, count: int) -> int:
        """How many of some to train at a time: more than an engine gains by would only lie in memory."""
        return min(count, _WAVES * self.engine.processes) if self.engine.independent else _few_sizes(count)

    def _needed(self) -> int:
        """How many more updates make the last version; under a barrier all that are under way."""
        server = self.server
        if server.strategy.barrier:
            return len(self._queue)
        return (server.agreed.work.rounds - server.version) * server.strategy.buffer - len(server.buffer)

    def _receive(self, asked: Asked) -> None:
        """Take what training brings, and find out what is wrong with it."""
        training, asked.training = asked.training, None
        if training is None:
            return
        came, missing = received(training.outcomes, list(training.jobs.values()))
        for stack, some in _by_stack(came):
            self._look_at(training, some, stack)
        for client, reason in missing.items():
            number = training.under_way[client].flight.number
            self._trained[number] = Trained(Landing(number, None, reason, looked=True), {}, 0)

    def _look_at(self, training: InTraining, came: Sequence[Outcome], stack: Together | None) -> None:
        """Find out what is wrong with outcomes, of one stack or of none."""
        server, phase = self.server, training.phase
        clients = [outcome.update.client for outcome in came]
        jobs = [training.jobs[client] for client in clients]
        flights = [training.under_way[client].flight for client in clients]
        bases = [server.base(flight.version) for flight in flights]
        trees = [outcome.update.shared for outcome in came]
        stacks = Stacks(trees, stack and {key: stack.ended[key] for key in phase.shared})
        why = flaws_of_outcomes(self.sites, phase, bases, came, jobs, stacks)
        entries = {key: phase.schema[key][0] for key in phase.shared}
        moved: Sequence[Moved | None] = [None] * len(came)
        if server.norm_factor:
            moved = moved_in_stack(stack.ended, stack.begun, entries) if stack else moved_by(trees, bases, entries)
        for outcome, job, flight, far in zip(came, jobs, flights, moved, strict=True):
            flaw = why.get(job.client, "")
            landing = Landing(flight.number, outcome.update, flaw, None if flaw else far, looked=True)
            self._trained[flight.number] = Trained(landing, outcome.kept, job.num_steps)

    def _jobs(self, phase: PreparedPhase, under_way: Mapping[int, UnderWay]) -> dict[int, Job]:
        """What clients are to do, by client; those that began at the same version are sent the same."""
        sites, own = self.sites, self.states.get_many(list(under_way))
        versions: dict[int, list[int]] = defaultdict(list)
        for client, each in under_way.items():
            versions[each.flight.version].append(client)
        starts: dict[int, Tree] = {}
        for version, some in versions.items():
            trees = [own[client].tree for client in some]
            starts |= zip(some, phase.starts(self.server.base(version), trees, sites.device), strict=True)
        return {
            client: sites.job(phase, client, starts[client], each.used, self.server.numbers(each.flight))
            for client, each in under_way.items()
        }

    def _keep(self, each: UnderWay, trained: Trained) -> None:
        """Let what a client did count."""
        client, phase = each.flight.client, self.sites.phase(each.flight.phase)
        before = self.states.get_many([client])[client]
        after = state_after(phase, before, trained.steps, trained.kept)
        if after is not None:
            self.states.put(client, after)

    # -- restart --

    def state(self, *, over: bool = False) -> tuple[dict[str, Any], dict[str, Tree]]:
        """All that a restart needs beside what clients keep: JSON values, and trees of tensors.

        Of a run that is `over` the server's tree is left, and nothing to go on with.
        """
        facts, trees = self.server.state()
        facts["time"] = self.time
        if over:
            facts |= {"flights": [], "buffer": [], "under_way": []}
            return facts, {name: trees[name] for name in ("model", "memory")}
        facts["under_way"] = [[each.flight.number, each.arrives, each.free, each.used] for each in self._queue.begun()]
        if not self.engine.independent:
            asked, self._asked = self._asked, []  # where this is interrupted, they are asked for again
            for each in asked:
                self._receive(each)
            self._asked = asked
            facts["asked"] = [sorted(each.numbers) for each in asked]
            facts["trained"], more = stored(self._trained)
            trees |= more
        return facts, trees

    def load(self, facts: Mapping[str, Any], trees: Mapping[str, Tree]) -> None:
        """Go on from what `state` gave."""
        self.server.load(facts, trees)
        self.time = facts["time"]
        self._queue = Queue(
            UnderWay(self.server.flights[number], arrives, free, used)
            for number, arrives, free, used in facts["under_way"]
        )
        self._trained = restored(facts.get("trained", []), trees)
        self._asked = [Asked(frozenset(numbers), None) for numbers in facts.get("asked", [])]


def _by_stack(outcomes: Sequence[Outcome]) -> Iterator[tuple[Together | None, Sequence[Outcome]]]:
    """Outcomes with the stack whose rows they are, all of them; others with none."""
    for stack, each in groupby(outcomes, lambda outcome: outcome.together):
        some = list(each)
        whole = stack is not None and [outcome.update.client for outcome in some] == stack.clients
        yield (stack if whole else None), some


def _few_sizes(count: int) -> int:
    """How many are trained of some that could be: one or two powers of 2, as stacks on a GPU come.

    The others, who come last, wait for the next stack. A handful is trained as it is.

    >>> [_few_sizes(count) for count in (5, 9, 13, 25, 31, 100)]
    [5, 8, 12, 24, 24, 96]
    """
    spare = max(0, count.bit_length() - 2)
    return count if count < 8 else count >> spare << spare
