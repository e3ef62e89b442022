"""Clients under way in stacks that are programs, here played on the CPU: the same numbers as one after the other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

import tiny
from fednorm import strategies
from fednorm.core.state import Tree, digest
from fednorm.engines.base import Engine
from fednorm.engines.clock.schedule import shifted
from fednorm.engines.clock.simulation import Simulation
from fednorm.engines.sequential import SequentialEngine
from fednorm.engines.stack.jobs import JobProgram
from fednorm.engines.stack.kernels.layers import use_kernels
from fednorm.engines.stack.phase_program import PhaseProgram
from fednorm.engines.stack.rounding import Rounded
from fednorm.engines.stack.stacked import StackedEngine
from fednorm.halves.arrivals import ArrivalServer
from fednorm.halves.prepared_phase import PreparedPhase
from fednorm.halves.training import Job, Outcome
from fednorm.running.plan import Plan
from fednorm.running.store import Store

EQUAL = (8,) * 11
UNEQUAL = (7, 14, 11, 4, 9, 7, 14, 11, 4, 9, 8)
"""Batches of four, and epochs that end with fewer."""


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fednorm.engines.stack.jobs.DEVICES", {"cpu"})


def plan(method: str, sizes: Sequence[int], **changes: object) -> Plan:
    changes = {"rounds": 9, "train__local_steps": 5, "train__lr": 0.02, **changes}
    return tiny.plan(method, model=tiny.conv_net(), data=tiny.federation(tuple(sizes)), **changes)


def played(made: Plan, engine: Engine, strategy: str = "fedbuff(b=2)") -> tuple[Tree, dict[int, Tree]]:
    """The server's last tree, and what clients keep."""
    store = Store()
    server = ArrivalServer(made, made.federation.training_clients, strategies.parse(strategy), keep_reported=False)
    clock = Simulation(server, made, engine, store, shifted(), concurrency=9)
    while not server.finished:
        list(clock.advance())
    return server.tree, {client: store.get(client).tree for client in range(len(made.federation.clients))}


def gap(one: Tree, other: Tree) -> float:
    assert one.keys() == other.keys()
    return max((float((one[key].double() - other[key].double()).abs().max()) for key in one), default=0.0)


class Recorded(StackedEngine):
    """An engine that remembers who was trained with whom."""

    def __init__(self, runs: Sequence[Plan], together: list[list[int]]) -> None:
        super().__init__(runs, stays=False)
        self.together = together

    def train(self, phase: PreparedPhase, jobs: Sequence[Job], probing: bool = False) -> Iterator[Outcome]:
        self.together.append([job.client for job in jobs])
        return super().train(phase, jobs, probing)


METHODS = [
    "fedavg",
    "fedbn",
    "silobn(report=true)",
    "fixbn(at=0.5)",
    "fedprox",
    "fedbn+local-momentum",
    "gn",
    "tracker",
]


@pytest.mark.parametrize("sizes", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("method", METHODS)
def test_programs_bring_what_clients_bring_alone(method: str, sizes: Sequence[int]) -> None:
    tree, kept = played(plan(method, sizes), SequentialEngine(plan(method, sizes)))
    engine = StackedEngine([made := plan(method, sizes)], stays=False)
    other, also_kept = played(made, engine)
    assert engine._jobs._programs
    assert not engine._jobs._refused
    assert not engine.fell_back
    assert gap(tree, other) < 1e-10
    for client, own in kept.items():
        assert gap(own, also_kept[client]) < 1e-10


def test_stacks_come_in_few_sizes_and_are_used_again() -> None:
    made = plan("fedavg", EQUAL, rounds=40)
    engine = StackedEngine([made], stays=False)
    played(made, engine)
    stacks = engine._jobs._programs
    assert {each.rows for each in stacks.values()} <= {1, 2, 4, 8}
    assert max(each.turn for each in stacks.values()) > 3
    assert all(each._programs.keys() == {"step of everybody"} for each in stacks.values())


@pytest.mark.parametrize("devices", [{"cpu"}, set()], ids=["programs", "step by step"])
def test_clients_of_other_versions_have_rates_of_their_own(devices: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate that falls with every version."""
    monkeypatch.setattr("fednorm.engines.stack.jobs.DEVICES", devices)
    changes = {"train__schedule": "cosine", "train__momentum": 0.9}
    tree, _ = played(
        plan("fixbn(at=0.5)", UNEQUAL, **changes), SequentialEngine(plan("fixbn(at=0.5)", UNEQUAL, **changes))
    )
    engine = StackedEngine([made := plan("fixbn(at=0.5)", UNEQUAL, **changes)], stays=False)
    other, _ = played(made, engine)
    assert bool(engine._jobs._programs) == bool(devices)
    assert gap(tree, other) < 1e-10


def test_a_rate_that_falls_leaves_stacks_as_they_are() -> None:
    def stacks(schedule: str) -> list[list[int]]:
        together = list[list[int]]()
        made = plan("fedavg", EQUAL, rounds=12, train__schedule=schedule)
        played(made, Recorded([made], together))
        return together

    assert stacks("cosine") == stacks("constant")


def test_stack_operators_serve_them_too() -> None:
    """Convolutions and batch norms as stack operators, filters with the channel last, neighbours fused."""
    tree, _ = played(plan("fedavg", UNEQUAL), SequentialEngine(plan("fedavg", UNEQUAL)))
    made = plan("fedavg", UNEQUAL)
    assert use_kernels(made.prepared.model)
    engine = StackedEngine([made], stays=False)
    other, _ = played(made, engine)
    assert engine._jobs._programs
    assert gap(tree, other) < 1e-10


@pytest.mark.parametrize("sizes", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
def test_weights_are_rounded_anew_only_where_others_wrote_them(
    sizes: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    renewed = list[Rounded]()
    real = Rounded.renew

    def renew(self: Rounded) -> None:
        renewed.append(self)
        real(self)

    def ended(**changes: object) -> tuple[Tree, int]:
        made = plan("fedavg", sizes, train__dtype="float32", **changes)
        assert use_kernels(made.prepared.model, torch.bfloat16)
        engine = StackedEngine([made], stays=False)
        tree, _ = played(made, engine)
        return tree, sum(each.turn for each in engine._jobs._programs.values())

    monkeypatch.setattr(Rounded, "renew", renew)
    kept, stacks = ended()
    assert renewed
    if sizes is EQUAL:
        assert len(renewed) == stacks
    run = PhaseProgram._run
    monkeypatch.setattr(JobProgram, "_run", lambda self, *args, **named: run(self, *args, **named | {"anew": True}))
    always, _ = ended()
    assert digest(kept) == digest(always)


def test_what_cannot_be_a_program_is_stacked_step_by_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no such graph")

    tree, _ = played(plan("fedavg", EQUAL), SequentialEngine(plan("fedavg", EQUAL)))
    monkeypatch.setattr("fednorm.engines.stack.phase_program.Program", fail)
    engine = StackedEngine([made := plan("fedavg", EQUAL)], stays=False)
    other, _ = played(made, engine)
    assert gap(tree, other) < 1e-10
    told = "stacked engine: rounds cannot stay on the device (no such graph); clients are stacked step by step\n"
    assert capsys.readouterr().err == told


def test_a_stack_that_does_not_fit_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    real = JobProgram.begin

    def begin(self: JobProgram, starts: Sequence[Tree]) -> Tree:
        if len(starts) > 2:
            raise torch.OutOfMemoryError("too many")
        return real(self, starts)

    monkeypatch.setattr(JobProgram, "begin", begin)
    tree, _ = played(plan("fedavg", EQUAL), SequentialEngine(plan("fedavg", EQUAL)))
    engine = StackedEngine([made := plan("fedavg", EQUAL)], stays=False)
    other, _ = played(made, engine)
    assert {each.rows for each in engine._jobs._programs.values()} <= {1, 2}
    assert gap(tree, other) < 1e-10


def test_a_stack_is_begun_before_anybody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, _ = played(plan("fedavg", UNEQUAL), SequentialEngine(plan("fedavg", UNEQUAL)))
    monkeypatch.setattr("fednorm.engines.stack.stacked.WORTH", 3)
    made = plan("fedavg", UNEQUAL)
    server = ArrivalServer(made, made.federation.training_clients, strategies.parse("fedbuff(b=2)"))
    clock = Simulation(server, made, StackedEngine([made], stays=False), Store(), shifted(), concurrency=9)
    early = 0
    while not server.finished:
        list(clock.advance())
        early += bool(clock._asked)
    assert early
    assert gap(tree, server.tree) < 1e-10


@pytest.mark.parametrize("engine", [StackedEngine, lambda runs: SequentialEngine(runs[0])], ids=["stacked", "plain"])
def test_a_client_of_a_stack_that_cannot_be_used_is_named(engine: Callable[[Sequence[Plan]], Engine]) -> None:
    made = plan("fedavg", EQUAL)
    (bad,) = made.federation.clients[3:4]
    made.federation.x[bad] = torch.nan
    server = ArrivalServer(made, made.federation.training_clients, strategies.parse("fedbuff(b=2)"))
    clock = Simulation(server, made, engine([made]), Store(), shifted(), concurrency=9)
    came = [arrival for _ in range(12) for arrival in clock.advance()]
    assert {arrival.client for arrival in came if arrival.refused} == {3}
    assert {arrival.refused for arrival in came} == {"", "'0.weight' is not finite"}


@pytest.mark.parametrize("worth", [3, 100])
@pytest.mark.parametrize("method", ["fedbn+local-momentum", "tracker"])
def test_neither_a_checkpoint_nor_a_restart_changes_a_bit(
    method: str, worth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates that left a stack and have not arrived are kept: who is trained along may change their bits.

    So who is trained along must not depend on when somebody saved.
    """
    monkeypatch.setattr("fednorm.engines.stack.stacked.WORTH", worth)

    def made(store: Store, together: list[list[int]]) -> Simulation:
        sites = plan(method, UNEQUAL)
        server = ArrivalServer(sites, sites.federation.training_clients, strategies.parse("fedbuff(b=2)"))
        return Simulation(server, sites, Recorded([sites], together), store, shifted(), concurrency=9)

    def ended(restarts: Sequence[int] = (), saves: Sequence[int] = ()) -> tuple[str, list[str], list[list[int]]]:
        store, together = Store(), list[list[int]]()
        clock, event = made(store, together), 0
        while not clock.server.finished:
            if event in (*restarts, *saves):
                facts, trees = clock.state()
            if event in restarts:
                clock = made(store, together)
                clock.load(json.loads(json.dumps(facts)), trees)
            list(clock.advance())
            event += 1
        own = [digest(store.get(client).tree) for client in range(len(UNEQUAL))]
        return digest(clock.server.tree), own, together

    whole = ended()
    assert ended(restarts=[1, 5, 6]) == whole
    assert ended(restarts=[3, 11, 14]) == whole
    for event in range(1, 12):
        assert ended(saves=[event]) == whole


def test_a_checkpoint_that_was_interrupted_can_be_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was trained for it was not looked at, and is trained anew."""
    monkeypatch.setattr("fednorm.engines.stack.jobs.DEVICES", set[str]())
    interrupts = list[bool]()

    class Interrupted(StackedEngine):
        def train(self, phase: PreparedPhase, jobs: Sequence[Job], probing: bool = False) -> Iterator[Outcome]:
            for done in super().train(phase, jobs, probing):
                if interrupts:
                    raise KeyboardInterrupt
                yield done

    def made(store: Store) -> Simulation:
        sites = plan("fixbn(at=0.5)", UNEQUAL)
        server = ArrivalServer(sites, sites.federation.training_clients, strategies.parse("fedbuff(b=2)"))
        engine = Interrupted([sites], stays=False)
        return Simulation(server, sites, engine, store, shifted(), concurrency=9)

    whole, store = made(Store()), Store()
    while not whole.server.finished:
        list(whole.advance())
    clock, interrupted = made(store), 0
    while not clock.server.finished:
        list(clock.advance())
        interrupts.append(True)
        try:
            clock.state()
        except KeyboardInterrupt:
            interrupted += 1
        interrupts.clear()
        facts, trees = clock.state()
        clock = made(store)
        clock.load(json.loads(json.dumps(facts)), trees)
    assert interrupted
    assert gap(whole.server.tree, clock.server.tree) < 1e-10
