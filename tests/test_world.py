"""Clients that are gone or slow: keyed, the same in every engine, exact after a restart, and told in the rows."""

from __future__ import annotations

from typing import Any

import pytest

import tiny
from fednorm.core.world import World
from fednorm.errors import ConfigError
from fednorm.running.run import Run
from fednorm.running.store import Store
from test_stacked import assert_same_clients, gap

DATA = tiny.federation((8, 12, 9, 8, 10))
WORLD: dict[str, Any] = {
    "data": DATA,
    "rounds": 6,
    "train__local_steps": 4,
    "world__dropout": 0.4,
    "world__stragglers": 0.5,
    "world__slowness": 0.25,
}


def rows(run: Run) -> list[Any]:
    run.stop()
    return list(run.store.rows())


def test_clients_are_drawn_by_seed_round_and_client_alone() -> None:
    world = World(7, dropout=0.5, stragglers=0.5)
    there = world.present(3, range(100))
    assert there == [client for client in range(100) if client in set(world.present(3, range(200)))]
    assert there != world.present(4, range(100)) != World(8, dropout=0.5).present(4, range(100))
    slow = world.shares(3, range(100))
    assert {client: share for client, share in world.shares(3, range(200)).items() if client < 100} == slow


def test_as_many_are_gone_or_slow_as_was_asked_for() -> None:
    world = World(0, dropout=0.3, stragglers=0.2, slowness=0.5)
    there = world.present(1, range(10_000))
    shares = world.shares(1, range(10_000))
    assert len(there) == pytest.approx(7_000, abs=150)
    assert len(shares) == pytest.approx(2_000, abs=150)
    assert min(shares.values()) >= 0.5
    assert sum(shares.values()) / len(shares) == pytest.approx(0.75, abs=0.02)


def test_one_client_always_stays() -> None:
    world = World(0, dropout=0.999)
    assert {len(world.present(round, range(3))) for round in range(1, 50)} == {1}


def test_rows_say_who_was_gone_and_who_was_slow() -> None:
    run = tiny.play(tiny.plan("fedavg", **WORLD))
    seen = rows(run)
    world = World(0, 0.4, 0.5, 0.25)
    steps = dict.fromkeys(range(5), 0)
    for row in seen:
        there = world.present(row["round"], range(5))
        assert row.get("dropped", []) == [client for client in range(5) if client not in there]
        assert row["clients"] == len(there)
        assert row.get("cohort", list(range(5))) == there
        slow = {int(client): done for client, done in row.get("straggled", {}).items()}
        assert slow == {c: max(1, int(4 * share)) for c, share in world.shares(row["round"], there).items()}
        for client in there:
            steps[client] += slow.get(client, 4)
    assert any("dropped" in row for row in seen)
    assert any("straggled" in row for row in seen)
    assert "refused" not in str(seen)
    assert {client: run.store.get(client).steps for client in range(5)} == steps


def test_a_world_without_failures_changes_nothing() -> None:
    ideal = tiny.fingerprint(tiny.play(tiny.plan("fedbn", data=DATA)))
    same = tiny.fingerprint(tiny.play(tiny.plan("fedbn", data=DATA, world__slowness=0.9)))
    assert ideal == same
    assert not {"dropped", "straggled"} & set(ideal["rows"][0])


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "fixbn+local-momentum", "decoupled"])
def test_engines_agree(method: str) -> None:
    reference = tiny.play(tiny.plan(method, engine__name="sequential", **WORLD))
    stacked = tiny.play(tiny.plan(method, engine__name="stacked", **WORLD))
    assert gap(reference, stacked) < 1e-10
    assert_same_clients(reference, stacked)
    left, right = rows(reference), rows(stacked)
    for name in ("dropped", "straggled", "cohort", "bytes_up", "bytes_down"):
        assert [row.get(name) for row in left] == [row.get(name) for row in right]


@pytest.mark.slow
def test_rounds_on_the_device_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fednorm.engines.stack.slot.DEVICES", {"cpu"})
    reference = tiny.play(tiny.plan("fedbn", engine__name="sequential", **WORLD))
    stayed = tiny.play(tiny.plan("fedbn", engine__name="stacked", **WORLD))
    assert gap(reference, stayed) < 1e-10
    assert_same_clients(reference, stayed)


@pytest.mark.slow
def test_workers_are_the_reference_to_the_bit() -> None:
    reference = tiny.play(tiny.plan("fedbn", engine__name="sequential", **WORLD))
    workers = tiny.play(tiny.plan("fedbn", engine__name="workers", engine__workers=2, **WORLD))
    assert tiny.fingerprint(reference) == tiny.fingerprint(workers)


def test_a_run_goes_on_exactly() -> None:
    whole = tiny.play(tiny.plan("fedbn", **WORLD))
    store = Store()
    tiny.play(tiny.plan("fedbn", **WORLD), store, rounds=3)
    assert tiny.fingerprint(tiny.play(tiny.plan("fedbn", **WORLD), store)) == tiny.fingerprint(whole)


def test_a_quorum_counts_those_that_are_there() -> None:
    seen = rows(tiny.play(tiny.plan("fedavg", engine__quorum=1.0, **WORLD)))
    assert len(seen) == 6
    assert all("refused" not in row for row in seen)


def test_lock_step_loses_clients_but_waits_for_all_others() -> None:
    equal = {"data": tiny.federation((8, 8, 8, 8)), "world__dropout": 0.5, "rounds": 3}
    seen = rows(tiny.play(tiny.plan("fedtan", **equal)))
    assert any("dropped" in row for row in seen)
    with pytest.raises(ConfigError) as refusal:
        tiny.plan("fedtan", **equal, world__stragglers=0.5)
    assert str(refusal.value) == (
        "'fedtan' steps in lock-step, where all wait for the slowest, so world.stragglers=0.5 cannot be played; "
        "set it to 0, or take another method"
    )


def test_centralized_training_has_no_clients_to_lose() -> None:
    ideal = tiny.play(tiny.plan("centralized", data=DATA, rounds=2))
    failing = tiny.play(tiny.plan("centralized", **{**WORLD, "rounds": 2, "train__local_steps": 2}))
    assert tiny.fingerprint(ideal)["server"] == tiny.fingerprint(failing)["server"]
    assert "dropped" not in rows(failing)[0]


def test_a_share_of_the_clients_is_drawn() -> None:
    for share, count in ((0.4, 2), (0.5, 3), (0.01, 1), (1.0, 5)):
        made = tiny.plan("fedavg", data=DATA, client_fraction=share)
        assert made.cohort_size == count
    by_share = tiny.play(tiny.plan("fedavg", data=DATA, client_fraction=0.4))
    by_number = tiny.play(tiny.plan("fedavg", data=DATA, clients_per_round=2))
    assert tiny.fingerprint(by_share) == tiny.fingerprint(by_number)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"world__dropout": 1.0}, "world.dropout=1.0 is out of range; give 0 up to below 1"),
        ({"world__dropout": float("nan")}, "world.dropout=nan is out of range; give 0 up to below 1"),
        ({"world__stragglers": 1.5}, "world.stragglers=1.5 is out of range; give 0 up to 1"),
        ({"world__slowness": 0.0}, "world.slowness=0.0 is out of range; give a share above 0, up to 1"),
        ({"client_fraction": 0.0}, "client_fraction=0.0 is out of range; give a share above 0, up to 1"),
        ({"client_fraction": float("nan")}, "client_fraction=nan is out of range; give a share above 0, up to 1"),
        (
            {"client_fraction": 0.5, "clients_per_round": 2},
            "clients_per_round=2 and client_fraction=0.5 exclude each other; give one",
        ),
        (
            {"train__warmup": 9, "rounds": 4},
            "train.warmup=9 is longer than the run of 4 rounds; give fewer rounds, or a share below 1",
        ),
        (
            {"train__warmup": 1.5},
            "train.warmup=1.5 is out of range; give a whole number of rounds, or a share below 1",
        ),
        (
            {"train__warmup": -1},
            "train.warmup=-1.0 is out of range; give a whole number of rounds, or a share below 1",
        ),
        (
            {"train__warmup": float("nan")},
            "train.warmup=nan is out of range; give a whole number of rounds, or a share below 1",
        ),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        tiny.config(**changes)
    assert str(refusal.value) == message


def test_a_warm_up_is_a_factor_on_the_schedule() -> None:
    made = tiny.plan("fedavg", rounds=8, train__schedule="step", train__warmup=4, train__lr=1.0)
    found = [row["lr"] for row in rows(tiny.play(made))]
    assert found == pytest.approx([0.25, 0.5, 0.75, 1, 0.1, 0.1, 0.01, 0.01])
    share = tiny.plan("fedavg", rounds=8, train__warmup=0.25, train__lr=1.0)
    assert [row["lr"] for row in rows(tiny.play(share))] == pytest.approx([0.5] + [1.0] * 7)
