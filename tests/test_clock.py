"""Clients in virtual time: the bits of rounds where rounds are possible, exact order, restarts at any event."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

import tiny
from fednorm import strategies
from fednorm.core.phases import PhaseId, Purpose
from fednorm.core.state import digest
from fednorm.engines.base import Engine
from fednorm.engines.clock.schedule import Schedule, Times, default, equal, shifted
from fednorm.engines.clock.simulation import Simulation
from fednorm.engines.sequential import SequentialEngine
from fednorm.engines.stack.stacked import StackedEngine
from fednorm.engines.workers import WorkersEngine
from fednorm.errors import ConfigError, UserCodeError
from fednorm.halves.arrivals import ArrivalServer
from fednorm.halves.landing import Arrival
from fednorm.halves.prepared_phase import PreparedPhase
from fednorm.halves.training import Job, Outcome
from fednorm.running.plan import Plan
from fednorm.running.store import Store

SIZES = (8, 12, 9, 10, 11)


@dataclass(frozen=True)
class Given:
    """Times of each client, the same for all its jobs."""

    times_of: Mapping[int, tuple[float, float, float]]

    def times(self, seed: int, client: int, job: int) -> Times:
        return Times(*self.times_of.get(client, (0.0, 1.0, 0.0)))


@dataclass
class Recording(SequentialEngine):
    """The reference, which notes whom it trained together."""

    plan: Plan
    groups: list[list[tuple[int, int]]] = field(default_factory=list)
    independent: bool = False
    """else no more are trained at a time than its one process gains by"""

    def __post_init__(self) -> None:
        super().__init__(self.plan)

    def train(self, phase: PreparedPhase, jobs: Sequence[Job], probing: bool = False) -> Iterator[Outcome]:
        self.groups.append([(job.client, job.first_batch) for job in jobs])
        yield from super().train(phase, jobs, probing)


def plan(method: str = "fedavg", **changes: Any) -> Plan:
    return tiny.plan(method, model=tiny.conv_net(), data=tiny.federation(SIZES), **changes)


def simulation(
    strategy: str,
    made: Plan | None = None,
    schedule: Schedule | None = None,
    concurrency: int = 3,
    engine: Engine | None = None,
    store: Store | None = None,
    **options: Any,
) -> Simulation:
    made = made or plan()
    server = ArrivalServer(made, made.federation.training_clients, strategies.parse(strategy), keep_reported=False)
    chosen = engine or SequentialEngine(made)
    return Simulation(server, made, chosen, store or Store(), schedule or default(), concurrency=concurrency, **options)


def played(clock: Simulation) -> list[Arrival]:
    """All arrivals, to the end."""
    found: list[Arrival] = []
    while not clock.server.finished:
        found += clock.advance()
    return found


def result(clock: Simulation, store: Store) -> dict[str, Any]:
    facts, trees = clock.state()
    states = {client: (store.get(client).steps, digest(store.get(client).tree)) for client in range(len(SIZES))}
    server = {name: digest(tree) for name, tree in trees.items()}
    return {"time": facts["time"], "under_way": facts["under_way"], "server": server, "clients": states}


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "silobn", "fixbn", "fixbn+local-momentum", "fbn", "fedadam"])
@pytest.mark.parametrize("engine", [SequentialEngine, StackedEngine], ids=lambda each: each.__name__)
def test_equal_times_and_a_buffer_for_all_are_rounds(method: str, engine: type[Any]) -> None:
    made, store = plan(method), Store()
    trainer = engine([made], precision="fp32", stays=False) if engine is StackedEngine else engine(made)
    clock = simulation("fedbuff(b=5,staleness=none)", made, equal(), 5, trainer, store)
    played(clock)
    name = "stacked" if engine is StackedEngine else "sequential"
    rounds = tiny.play(plan(method, train__weights="uniform", engine__name=name))
    assert digest(clock.server.tree) == digest(rounds.server.tree)
    assert digest(clock.server.held.memory) == digest(rounds.server.held.memory)
    for client in range(5):
        own, other = store.get(client), rounds.store.get(client)
        assert (own.steps, digest(own.tree)) == (other.steps, digest(other.tree))
    assert clock.time == 4.0


def test_workers_bring_the_bits_of_the_reference() -> None:
    clocks = []
    for engine in (SequentialEngine(plan("fedbn")), WorkersEngine(plan("fedbn"), 2)):
        clock = simulation("fedbuff(b=2)", plan("fedbn"), engine=engine)
        played(clock)
        engine.close()
        clocks.append(digest(clock.server.tree))
    assert engine.fell_back == ""
    assert clocks[0] == clocks[1]


def test_a_schedule_worked_out_by_hand() -> None:
    """Client 0 takes 1, client 1 takes 1.5 and client 2 takes 4.5; every update makes a version."""
    times = {0: (0.0, 1.0, 0.0), 1: (0.25, 1.0, 0.25), 2: (0.5, 3.5, 0.5)}
    made = tiny.plan("fedbn", model=tiny.conv_net(), data=tiny.federation(SIZES[:3]), rounds=8)
    clock = simulation("fedbuff(b=1)", made, Given(times), 3)
    found: list[tuple[float, int, int, int]] = []
    while not clock.server.finished:
        for each in clock.advance():
            found.append((clock.time, each.client, each.staleness, each.version))
    assert found == [
        (1.0, 0, 0, 1),
        (1.5, 1, 1, 2),
        (2.0, 0, 1, 3),
        (3.0, 0, 0, 4),
        (3.0, 1, 2, 5),
        (4.0, 0, 0, 6),
        (4.5, 1, 1, 7),
        (4.5, 2, 7, 8),
    ]


def test_all_of_an_instant_arrive_by_client_before_anybody_is_sent_anything() -> None:
    clock = simulation("fedbuff(b=2)", plan("fedbn", rounds=9), equal(), 5)
    first = list(clock.advance())
    assert [each.client for each in first] == [0, 1, 2, 3, 4]
    assert [each.version for each in first] == [0, 1, 1, 2, 2]
    assert [each.staleness for each in first] == [0, 0, 1, 1, 2]
    assert clock.server.flights == {}
    second = list(clock.advance())
    assert [each.client for each in second] == [0, 1, 2, 3, 4]
    assert [each.staleness for each in second] == [0, 1, 1, 2, 2]
    assert clock.time == 2.0


def test_a_client_that_keeps_nothing_is_sent_the_model_while_its_update_travels() -> None:
    """Two of two clients are under way; their updates travel for long, so both are idle when the first arrives."""
    made = tiny.plan("fedavg", model=tiny.conv_net(), data=tiny.federation(SIZES[:2]), rounds=40)
    schedule = Given({0: (0.0, 1.0, 9.0), 1: (0.0, 1.0, 9.5)})
    engine, store = Recording(made), Store()
    clock = simulation("fedbuff(b=1)", made, schedule, 2, engine, store)
    together = 0
    while not clock.server.finished:
        arrivals = [each.client for each in clock.advance()]
        flying = [flight.client for flight in clock.server.flights.values()]
        together += len(arrivals) == 1 and flying == arrivals
    assert together > 0
    begun = [job for group in engine.groups for job in group]
    assert len(set(begun)) == len(begun), "batches that a job on its way has used are not used again"
    assert sum(store.get(client).steps for client in (0, 1)) == 40 * 2


def test_a_client_that_keeps_something_has_one_job_at_a_time() -> None:
    made = tiny.plan("fedbn", model=tiny.conv_net(), data=tiny.federation(SIZES[:2]), rounds=20)
    clock = simulation("fedbuff(b=1)", made, Given({0: (0.0, 1.0, 9.0), 1: (0.0, 1.0, 9.5)}), 2)
    while not clock.server.finished:
        list(clock.advance())
        clients = [flight.client for flight in clock.server.flights.values()]
        assert len(clients) == len(set(clients))


def test_all_that_are_under_way_train_together() -> None:
    """Those that cannot come before the end are not trained; the last instant ends with the last version."""
    made = plan("fedbn", rounds=7)
    engine = Recording(made)
    schedule = Given({client: (0.0, 1 + client / 10, 0.0) for client in range(5)})
    assert len(played(simulation("fedbuff(b=1)", made, schedule, 5, engine))) == 7
    assert [len(group) for group in engine.groups] == [5, 2]
    assert len(played(simulation("fedbuff(b=1)", made, equal(), 4))) == 7
    mixed = Recording(plan("fedbn", rounds=30))
    played(simulation("fedbuff(b=1)", mixed.plan, default(), 4, mixed))
    sizes = [len(group) for group in mixed.groups]
    assert sizes[0] == 4
    assert len(sizes) < 20


def test_no_more_are_trained_at_a_time_than_an_engine_gains_by() -> None:
    """Two hundred large models that wait for their time to arrive would fill the memory of a machine without a GPU."""
    many = tiny.federation((8,) * 12)
    plans = [tiny.plan("fedavg", model=tiny.conv_net(), data=many, rounds=30) for _ in range(2)]
    one_by_one, stacked = Recording(plans[0], independent=True), Recording(plans[1])
    servers: list[dict[str, str]] = []
    for engine in (one_by_one, stacked):
        clock = simulation("fedbuff(b=1)", engine.plan, default(), 12, engine)
        played(clock)
        servers.append({name: digest(tree) for name, tree in clock.server.state()[1].items()})
    assert max(len(group) for group in one_by_one.groups) <= 4
    assert max(len(group) for group in stacked.groups) == 12
    assert servers[0] == servers[1]


def test_learning_rates_of_different_versions_train_apart() -> None:
    made = plan(rounds=6, train__schedule="cosine")
    engine = Recording(made)
    rates: dict[int, float] = {}
    clock = simulation("fedbuff(b=1)", made, default(), 3, engine)
    while not clock.server.finished:
        for flight in clock.server.flights.values():
            rates[flight.version] = clock.server.numbers(flight)["lr"]
        list(clock.advance())
    assert rates == {each: made.numbers(PhaseId(Purpose.TRAIN), each + 1)["lr"] for each in rates}
    assert len(set(rates.values())) > 2


@pytest.mark.parametrize(
    ("strategy", "method", "stacked"),
    [
        ("fedbuff(b=2)", "fedbn+local-momentum", False),
        ("fedasync", "fixbn(at=0.5)", False),
        ("ca2fl(b=2)", "fedavg", False),
        ("fedbuff(b=2)", "fedavg", True),
    ],
)
def test_a_restart_at_any_event_changes_no_bit(strategy: str, method: str, stacked: bool) -> None:
    """Updates that were trained and have not arrived are trained again, or kept where their bits need it."""

    def made(store: Store) -> Simulation:
        sites = plan(method, rounds=12)
        engine = StackedEngine([sites], precision="fp32", stays=False) if stacked else SequentialEngine(sites)
        return simulation(strategy, sites, shifted(), 4, engine, store)

    store = Store()
    whole = made(store)
    arrivals = [(each.client, each.staleness, each.version) for each in played(whole)]
    expected = result(whole, store)
    draw = random.Random(strategy)  # noqa: S311
    for _ in range(5):
        store, seen = Store(), []
        clock = made(store)
        events = sorted(draw.sample(range(1, 16), 3))
        for event in range(1000):
            if clock.server.finished:
                break
            if event in events:
                facts, trees = clock.state()
                clock = made(store)
                clock.load(json.loads(json.dumps(facts)), trees)
            seen += [(each.client, each.staleness, each.version) for each in clock.advance()]
        assert seen == arrivals
        assert result(clock, store) == expected


def test_whom_a_round_on_the_clock_draws_is_whom_a_round_draws() -> None:
    clock = simulation("sync", plan(), default(), 2)
    cohorts = []
    while not clock.server.finished:
        cohorts += [each.row["cohort"] for each in clock.advance() if each.row]
    rounds = tiny.play(plan(clients_per_round=2))
    assert cohorts == [row.get("cohort") for row in rounds.store.rows()]
    assert digest(clock.server.tree) == digest(rounds.server.tree)


class Broken(SequentialEngine):
    """Client 2's training fails."""

    def train(self, phase: PreparedPhase, jobs: Sequence[Job], probing: bool = False) -> Iterator[Outcome]:
        if any(job.client == 2 for job in jobs):
            raise UserCodeError("no such thing")
        yield from super().train(phase, jobs, probing)


def test_a_client_that_fails_ends_the_run_or_is_gone_without() -> None:
    made = plan("fedbn", rounds=4)
    with pytest.raises(UserCodeError, match="no such thing"):
        played(simulation("fedbuff(b=2)", made, equal(), 5, Broken(made)))
    store = Store()
    clock = simulation("fedbuff(b=2)", made, equal(), 5, Broken(made), store, tolerant=True)
    arrivals = played(clock)
    assert {each.client: each.refused for each in arrivals if each.refused} == {
        2: "its training failed (no such thing)"
    }
    assert store.get(2).steps == 0


def test_more_at_a_time_than_there_are_clients_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        simulation("fedbuff", concurrency=6)
    assert str(error.value) == "concurrency=6 is out of range; 5 clients train, give 1 to that many"
