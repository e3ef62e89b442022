"""Every registered method, and some pairs, against every contract; new methods join by being registered."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch

import tiny
from fednorm.core.method import Method
from fednorm.core.phases import Purpose
from fednorm.core.state import Kind, Policy, digest, tree_bytes
from fednorm.engines.base import Train
from fednorm.errors import ConfigError
from fednorm.halves.prepared_phase import PreparedPhase
from fednorm.halves.schema import keys_with
from fednorm.halves.training import Job, Outcome
from fednorm.methods import known_methods, parse
from fednorm.running.plan import Plan
from fednorm.running.run import Run
from fednorm.running.store import Store

METHODS = tuple(known_methods())
VARIANTS = ("fixbn(at=window,window=2,tau=100.0)", "fixbn(at=1,affine=true)", "fedprox+silobn", "fixbn+local-momentum")
PAIRED_WITH = ("fedbn", "fixbn", "gn")
ROUNDS = 4


def _combines(expression: str) -> bool:
    try:
        parse(expression)
    except ConfigError as refusal:
        assert re.search("cannot (be combined|work): ", str(refusal))  # noqa: PT017
        return False
    return True


def _runs(expression: str) -> bool:
    """False for pairs in which one part leaves the other nothing to act on, such as gn+fedbn."""
    try:
        tiny.plan(expression)
    except ConfigError as refusal:
        assert "finds no BatchNorm layer" in str(refusal)  # noqa: PT017
        return False
    return True


def made(expression: str, **changes: Any) -> Plan:
    return tiny.plan(expression, **{"rounds": ROUNDS, "eval__every": ROUNDS, **changes})


def _pairs() -> Iterator[str]:
    for first in METHODS:
        for second in PAIRED_WITH:
            expression = f"{first}+{second}"
            is_new = first not in PAIRED_WITH or PAIRED_WITH.index(first) < PAIRED_WITH.index(second)
            if first != second and is_new and first != "fedavg" and _combines(expression) and _runs(expression):
                yield expression


PAIRS = tuple(_pairs())
every_method = pytest.mark.parametrize("expression", METHODS)
every_expression = pytest.mark.parametrize("expression", METHODS + VARIANTS + PAIRS)


class Spy:
    """Training that works on the clients in reverse and keeps what went over the wire."""

    def __init__(self, train: Train) -> None:
        self.train = train
        self.log: list[tuple[PreparedPhase, list[Job], list[Outcome]]] = []

    def __call__(self, phase: PreparedPhase, jobs: Sequence[Job], probing: bool = False) -> Iterator[Outcome]:
        # Clients in lock-step are one stack, whose order is the server's to choose; only their arrival is turned round.
        asked = list(jobs) if phase.phase.lockstep else list(reversed(jobs))
        outcomes = list(self.train(phase, asked, probing))
        self.log.append((phase, list(jobs), outcomes))
        return iter(reversed(outcomes))


@cache
def reference(expression: str) -> tuple[Run, dict[str, Any]]:
    run = tiny.play(made(expression))
    return run, tiny.fingerprint(run)


@cache
def spied(expression: str) -> tuple[Run, Spy, dict[str, Any]]:
    run = Run(made(expression), Store())
    run.engine.train = spy = Spy(run.engine.train)
    list(run.rounds())
    return run, spy, tiny.fingerprint(run)


@every_expression
def test_every_number_is_finite(expression: str) -> None:
    run, _ = reference(expression)
    assert all(bool(value.isfinite().all()) for value in run.server.tree.values())
    assert len(list(run.store.rows())) == ROUNDS


@every_method
def test_the_same_config_gives_the_same_bits_wherever_examples_lie_in_the_pool(expression: str) -> None:
    torch.manual_seed(12345)  # the global generator must not matter either
    data = tiny.relabelled(tiny.federation(), [2, 0, 1])
    assert tiny.fingerprint(tiny.play(made(expression, data=data))) == reference(expression)[1]


@every_method
def test_another_seed_gives_other_numbers(expression: str) -> None:
    other = tiny.fingerprint(tiny.play(made(expression, seed=1)))
    assert other["rows"] != reference(expression)[1]["rows"]


@every_expression
def test_the_order_in_which_clients_work_and_arrive_changes_no_bit(expression: str) -> None:
    assert spied(expression)[2] == reference(expression)[1]


@every_expression
def test_a_resumed_run_equals_an_uninterrupted_one(expression: str, tmp_path: Any) -> None:
    path = tmp_path / "state.sqlite"
    first = tiny.play(made(expression), Store(path), rounds=2)
    assert first.round == 2
    first.store.close()
    again = Store(path)
    resumed = Run(made(expression), again)
    assert resumed.round == 2
    list(resumed.rounds())
    assert tiny.fingerprint(resumed) == reference(expression)[1]
    again.close()


@every_method
def test_a_resumed_run_with_partial_participation_equals_an_uninterrupted_one(expression: str, tmp_path: Any) -> None:
    changes = {"clients_per_round": 2, "engine__checkpoint_every": 2}

    path = tmp_path / "state.sqlite"
    first = Store(path)
    rows = Run(made(expression, **changes), first).rounds()
    for _ in range(3):
        next(rows)  # round 3 is played but not committed, as if the process had been killed
    first.close()
    again = Store(path)
    resumed = Run(made(expression, **changes), again)
    assert resumed.round == 2
    list(resumed.rounds())
    assert tiny.fingerprint(resumed) == tiny.fingerprint(tiny.play(made(expression, **changes)))
    again.close()


@every_expression
def test_what_is_sent_and_kept_follows_the_policies(expression: str) -> None:
    _, spy, _ = spied(expression)
    for phase, jobs, outcomes in spy.log:
        schema = phase.schema
        assert {job.client for job in jobs} == {outcome.update.client for outcome in outcomes}
        for outcome in outcomes:
            assert set(outcome.update.shared) == set(keys_with(schema, Policy.SHARED))
            assert set(outcome.update.reported) == set(keys_with(schema, Policy.REPORTED))
            assert set(outcome.kept) == set(keys_with(schema, Policy.LOCAL, Policy.REPORTED))
            for key, value in outcome.update.shared.items():
                assert (tuple(value.shape), value.dtype) == (schema[key][0].shape, schema[key][0].dtype)


@every_expression
def test_bytes_are_those_of_the_payload(expression: str) -> None:
    run, spy, _ = spied(expression)
    rows = list(run.store.rows())
    if run.plan.method.data == "union":
        assert {row["bytes_up"] + row["bytes_down"] for row in rows} == {0}
        return
    sent = received = 0
    for place, (phase, jobs, outcomes) in enumerate(spy.log):
        a_test_only = phase.id.purpose is Purpose.QUERY and place + 1 < len(spy.log)
        if phase.phase.union or a_test_only:
            continue
        schema = phase.schema
        together = sum(e.bytes for e, _ in schema.values() if e.part == "running_mean") * 4 * phase.phase.lockstep
        sent += sum(tree_bytes(o.update.shared) + tree_bytes(o.update.reported) + together for o in outcomes)
        down = sum(e.bytes for e, policy in schema.values() if policy in (Policy.SHARED, Policy.FROZEN))
        received += (down + together) * len(jobs)
    assert sum(row["bytes_up"] for row in rows) == sent
    assert sum(row["bytes_down"] for row in rows) == received


@every_expression
def test_state_that_must_outlive_a_round_is_declared(expression: str) -> None:
    run, _, _ = spied(expression)
    kept = any(run.store.get(client).tree for client in run.store.seen())
    method = run.plan.method
    if method.data == "each":
        assert kept == ("client_state" in method.needs)
    assert method.needs <= {"client_state", "lockstep", "union"}


@every_expression
def test_what_is_not_shared_does_not_move_at_the_server(expression: str) -> None:
    run, spy, _ = spied(expression)
    if run.plan.method.finish:
        pytest.skip("a finishing phase may set entries that the rounds leave alone")
    shared = {key for phase, _, _ in spy.log for key in keys_with(phase.schema, Policy.SHARED)}
    initial = run.plan.initial()
    still = [key for key in run.server.tree if key not in shared]
    assert all(torch.equal(run.server.tree[key], initial[key]) for key in still)


@every_method
def test_a_client_that_did_not_take_part_keeps_its_state(expression: str) -> None:
    if parse(expression).data == "union":
        pytest.skip("there are no clients")
    run = Run(made(expression, clients_per_round=1), Store())
    everyone = run.plan.federation.training_clients
    rows = run.rounds()
    for _ in range(ROUNDS - len(run.plan.method.finish[:1])):  # finishing phases, in the last round, ask everybody
        before = {client: run.store.get(client) for client in everyone}
        bits = {client: digest(state.tree) for client, state in before.items()}
        row = next(rows)
        for client in everyone:
            after = run.store.get(client)
            assert (after.steps > before[client].steps) == (client in row["cohort"])
            if client not in row["cohort"]:
                assert digest(after.tree) == bits[client]


@every_method
def test_how_often_the_model_is_scored_changes_nothing(expression: str) -> None:
    def state(every: int) -> dict[str, Any]:
        chosen = made(expression, clients_per_round=2, eval__every=every)
        return {key: value for key, value in tiny.fingerprint(tiny.play(chosen)).items() if key != "rows"}

    assert state(every=1) == state(every=ROUNDS)


@every_method
def test_probes_change_nothing(expression: str) -> None:
    probed = tiny.play(made(expression, rounds=2, eval__probes=["grad-norm", "drift", "running-var"]))
    plain = tiny.play(made(expression, rounds=2))
    ours, theirs = tiny.fingerprint(probed), tiny.fingerprint(plain)
    assert all("probes" in row for row in ours["rows"])
    for row in ours["rows"]:
        del row["probes"]
    assert ours == theirs


@every_method
def test_the_registry_says_what_a_method_is(expression: str) -> None:
    info = known_methods()[expression]
    assert info.paper
    assert info.summary
    assert not info.summary.endswith(".")
    assert info.needs == parse(expression).needs
    assert isinstance(parse(expression), Method)
    assert all(isinstance(kind, Kind) for part in parse(expression).parts for kind in part.acts_on)
