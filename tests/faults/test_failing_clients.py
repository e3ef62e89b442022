"""A client that fails, is killed or never answers is missing in a round; it never costs what the run has."""

from __future__ import annotations

import io
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import chaos
import pytest
import torch
from chaos import BAD

import tiny
from fednorm.core.state import digest
from fednorm.data.given import from_clients
from fednorm.errors import ConfigError, QuorumError, UserCodeError
from fednorm.halves.training import Outcome
from fednorm.running.observers import watching
from fednorm.running.records import RunId
from fednorm.running.run import Run
from fednorm.running.store import Store

every_engine = pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=pytest.mark.slow) if name == "workers" else name for name in chaos.ENGINES]
)


def fragile_plan(engine: str, tmp_path: Path, how: str, **changes: Any) -> tuple[Any, Path]:
    """A plan whose client 3 fails while the file that is returned too is there."""
    trap = tmp_path / "trap"
    data = chaos.fragile(trap, how)
    return chaos.plan(engine, "fedbn", data=data, engine__loaders=0, **changes), trap


# -- rows 1 and 27: training fails --


@pytest.mark.fault(row=1)
@pytest.mark.fault(row=27)
@pytest.mark.parametrize("how", ["error", "memory"])
@every_engine
def test_a_client_whose_training_fails_is_left_out(engine: str, how: str, tmp_path: Path) -> None:
    made, trap = fragile_plan(engine, tmp_path, how)
    reference = chaos.without(made, BAD)
    trap.touch()
    run = tiny.play(made)
    assert [list(row["refused"]) for row in chaos.rows(run)] == [[BAD]] * 3
    text = "RuntimeError: the disk is on fire" if how == "error" else "MemoryError: no room for an example"
    assert all(row["refused"][BAD].startswith("its training failed (") for row in chaos.rows(run))
    assert all(text in row["refused"][BAD] for row in chaos.rows(run))
    assert chaos.same(run, reference)
    assert run.store.get(BAD).steps == 0
    assert run.engine.fell_back == ""


@pytest.mark.slow
@pytest.mark.fault(row=1)
@pytest.mark.fault(row=27)
def test_a_client_that_ends_its_process_or_its_memory_is_left_out(tmp_path: Path) -> None:
    """The same processes go on: the one that was killed is replaced, one that ran out of memory is not."""
    for how, text in (("kill", "its process was ended by SIGKILL"), ("limit", "its training failed (")):
        made, trap = fragile_plan("workers", tmp_path, how, rounds=2)
        reference = chaos.without(fragile_plan("sequential", tmp_path, how, rounds=2)[0], BAD)
        trap.touch()
        run = tiny.play(made)
        trap.unlink()
        assert [list(row["refused"]) for row in chaos.rows(run)] == [[BAD]] * 2
        assert all(row["refused"][BAD].startswith(text) for row in chaos.rows(run))
        assert chaos.same(run, reference)
        assert run.store.get(BAD).steps == 0
    assert multiprocessing.active_children() == []


@pytest.mark.fault(row=1)
def test_without_a_quorum_a_failing_client_ends_the_run_with_its_error(tmp_path: Path) -> None:
    made, trap = fragile_plan("sequential", tmp_path, "error", engine__quorum=None)
    trap.touch()
    run = Run(made, Store())
    with pytest.raises(UserCodeError, match="RuntimeError: the disk is on fire"):
        list(run.rounds())
    assert chaos.rows(run) == []


@pytest.mark.fault(row=1)
def test_a_mistake_in_the_settings_still_ends_the_run() -> None:
    """It is nobody's failure: all clients have it."""
    data = tiny.federation((8, 8, 2))
    with pytest.raises(ConfigError, match="in lock-step and needs equal batches"):
        tiny.play(tiny.plan("fedtan", data=data, engine__name="sequential", engine__quorum=0.5))


# -- rows 2 and 5: answers that never come --


def dropping(*clients: int, until: int = 10**9) -> Callable[[int, Outcome], list[Outcome]]:
    """Updates of some clients are lost on the way, each client's up to this many times."""
    lost = dict.fromkeys(clients, 0)

    def spoil(round: int, outcome: Outcome) -> list[Outcome]:
        client = outcome.update.client
        if client in lost and lost[client] < until:
            lost[client] += 1
            return []
        return [outcome]

    return spoil


@pytest.mark.fault(row=2)
@every_engine
def test_a_client_whose_answer_is_lost_does_not_advance(engine: str) -> None:
    run = chaos.started(chaos.plan(engine, "fedbn"), dropping(BAD))
    assert [row.get("refused") for row in run.rounds()] == [{BAD: "it did not answer"}] * 3
    assert (run.store.get(BAD).steps, run.store.get(BAD).tree) == (0, {})
    assert chaos.same(run, chaos.without(chaos.plan(engine, "fedbn"), BAD))


@pytest.mark.fault(row=5)
@every_engine
def test_below_the_quorum_nothing_changes_and_the_run_can_go_on(engine: str) -> None:
    asked: list[int] = []

    def spoil(round: int, outcome: Outcome) -> list[Outcome]:
        asked.append(outcome.update.client)
        return [] if round == 2 and outcome.update.client >= 2 else [outcome]

    store, plan = Store(), chaos.plan(engine, "fedbn", engine__retries=2, engine__checkpoint_every=1)
    run = chaos.started(plan, spoil, store)
    with pytest.raises(QuorumError) as failure:
        list(run.rounds())
    assert str(failure.value) == (
        "2 of 10 updates usable in round 2, client 2: it did not answer; engine.quorum=0.8 needs more"
    )
    assert failure.value.exit_code == 4
    assert asked.count(0) == 2, "those that answered are not asked again"
    assert asked.count(2) == 1 + 3, "the others are, twice"
    once = tiny.play(chaos.plan(engine, "fedbn"), rounds=1)
    assert digest(store.tree("model")) == digest(once.server.tree)
    assert [store.get(client).steps for client in range(10)] == [2] * 10
    again = tiny.play(plan, store)
    whole = tiny.fingerprint(tiny.play(plan))
    assert tiny.fingerprint(again) == whole


@pytest.mark.fault(row=5)
@pytest.mark.parametrize("quorum", [0.8, None])
def test_clients_that_come_at_the_second_attempt_change_no_bit(quorum: float | None) -> None:
    plan = chaos.plan("sequential", "fedbn", engine__retries=1, engine__quorum=quorum)
    run = chaos.started(plan, dropping(*range(2, 10), until=1))
    assert [row.get("retried") for row in run.rounds()] == [1, None, None]
    reference = tiny.play(plan)
    assert digest(run.server.tree) == digest(reference.server.tree)
    assert tiny.fingerprint(run)["clients"] == tiny.fingerprint(reference)["clients"]


@pytest.mark.fault(row=5)
def test_a_failure_that_passes_is_tried_again_by_itself(tmp_path: Path) -> None:
    made, trap = fragile_plan("sequential", tmp_path, "error once")
    reference = tiny.play(made)
    trap.touch()
    run = tiny.play(made)
    assert tiny.fingerprint(run) == tiny.fingerprint(reference)


@pytest.mark.fault(row=5)
def test_without_a_quorum_every_client_must_answer() -> None:
    run = chaos.started(chaos.plan("sequential", engine__quorum=None), dropping(BAD))
    with pytest.raises(QuorumError) as failure:
        list(run.rounds())
    assert str(failure.value) == (
        "round 1, client 3: it did not answer; ask it again, or give a quorum to go on without it"
    )


# -- rows 12 to 14: bad data --


def with_inputs(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Ten clients, one of which has other inputs."""
    data = chaos.federation()
    x, own = data.x.clone(), data.clients[BAD]
    x[own] = change(x[own])
    return replace(data, x=x)


@pytest.mark.fault(row=12)
@every_engine
def test_bad_pixels_cost_one_client(engine: str, tmp_path: Path) -> None:
    """They come up in the course of a run; data that are in memory are looked at before."""
    made, trap = fragile_plan(engine, tmp_path, "nan")
    reference = chaos.without(made, BAD)
    trap.touch()
    run = tiny.play(made)
    text = "the input has numbers that are not finite; replace or leave out what is missing"
    assert all(text in row["refused"][BAD] for row in chaos.rows(run))
    assert run.store.get(BAD).tree == {}
    assert chaos.same(run, reference)


@pytest.mark.fault(row=14)
@every_engine
def test_a_client_that_diverges_leaves_the_others_alone(engine: str) -> None:
    plan = chaos.plan(engine, data=with_inputs(lambda x: x * 1e200))
    run = tiny.play(plan)
    assert all(list(row["refused"]) == [BAD] for row in chaos.rows(run))
    assert all(bool(value.isfinite().all()) for value in run.server.tree.values())
    assert chaos.same(run, chaos.without(plan, BAD))


@pytest.mark.fault(row=13)
@every_engine
def test_clients_with_one_example_a_trailing_one_or_constant_inputs_are_no_fault(engine: str) -> None:
    data = chaos.federation((1, 5, 9, 8, 8, 8, 8, 8, 8, 8))
    data = replace(data, x=torch.where(torch.arange(len(data.x))[:, None, None, None] < 6, 0.5, data.x))
    plan = chaos.plan(engine, data=data, train__local_steps=None, train__local_epochs=2)
    run = tiny.play(plan)
    assert all("refused" not in row for row in chaos.rows(run))
    assert all(bool(value.isfinite().all()) for value in run.server.tree.values())
    assert float(run.server.tree["1.running_var"].amin()) >= 0
    assert [run.store.get(client).steps for client in (0, 1, 2)] == [2 * 3, 2 * 3, 4 * 3], "a trailing one is left out"


@pytest.mark.fault(row=13)
def test_a_client_without_examples_is_named_before_the_run() -> None:
    some, none = tiny.examples(4, 0.0, 1), (torch.zeros(0, 1, 6, 6).double(), torch.zeros(0, dtype=torch.int64))
    with pytest.raises(ConfigError, match="client 1 has no examples; leave it out or give it data"):
        from_clients([some, none], some, num_classes=tiny.NUM_CLASSES)


# -- row 30: those who watch --


class Full(io.StringIO):
    """A stream that cannot be written to."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


@pytest.mark.fault(row=30)
@every_engine
def test_an_observer_that_fails_warns_once_and_changes_nothing(engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = chaos.plan(engine, "fedbn")
    reference = tiny.fingerprint(tiny.play(plan))
    run = Run(plan, Store())
    with watching(3, stream=Full()) as tell:
        for row in run.rounds():
            tell(RunId("fedbn", 0), row)
    assert tiny.fingerprint(run) == reference
    lines = [line for line in capsys.readouterr().err.splitlines() if "No space left on device" in line]
    assert len(lines) == 1
