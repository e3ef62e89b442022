"""Rounds that stay on the device, here played on the CPU: the same numbers as the reference, for every method."""

from __future__ import annotations

import pytest

import tiny
from fednorm.engines.kernels.layers import use_kernels
from fednorm.engines.rounds import Run
from fednorm.registry import known_methods
from fednorm.store import Store
from test_stacked import PAIRS, assert_same_clients, gap


@pytest.fixture(autouse=True)
def stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fednorm.engines.seat.DEVICES", {"cpu"})


def on_device(method: str, **changes: object) -> Run:
    run = Run(tiny.plan(method, engine__name="stacked", **changes), Store())
    assert run.seat is not None
    assert list(run.rounds())
    return run


@pytest.mark.parametrize("method", [*known_methods(), *PAIRS])
def test_rounds_on_the_device_equal_the_reference_after_fifty_steps(method: str) -> None:
    changes = {"data": tiny.federation((8, 8, 8)), "rounds": 10, "train__local_steps": 5, "train__lr": 0.02}
    reference = tiny.play(tiny.plan(method, engine__name="sequential", eval__every=10, **changes))
    stayed = on_device(method, eval__every=10, **changes)
    assert gap(reference, stayed) < 1e-10
    assert_same_clients(reference, stayed)


@pytest.mark.parametrize("steps", [1, 3], ids=["one program a round", "three programs a round"])
@pytest.mark.parametrize("method", ["fedavg", "fixbn", "fedbn", "fedprox", "local-momentum", "fedadam"])
def test_stack_operators_and_their_fusion_change_nothing(method: str, steps: int) -> None:
    """Convolutions and batch norms as stack operators, filters laid out with the channel last, neighbours fused."""
    changes = {"data": tiny.federation((8, 8, 8)), "rounds": 6, "train__local_steps": steps, "train__lr": 0.02}
    reference = tiny.play(tiny.plan(method, engine__name="sequential", **changes))
    plan = tiny.plan(method, engine__name="stacked", **changes)
    assert use_kernels(plan.prepared.model)
    stayed = Run(plan, Store())
    list(stayed.rounds())
    assert stayed.seat is not None
    assert not stayed.seat.resident.refused
    assert gap(reference, stayed) < 1e-10


def test_checkpoints_come_at_the_rounds_the_config_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where rounds are settled in bursts."""
    committed: list[int] = []
    whole = Run._commit

    def noted(self: Run) -> None:
        committed.append(self.round)
        whole(self)

    monkeypatch.setattr(Run, "_commit", noted)
    data = tiny.federation((8, 8, 8))
    on_device("fedavg", data=data, rounds=20, eval__every=20, engine__checkpoint_every=7)
    assert committed == [0, 7, 14, 20]


def test_rounds_of_ever_new_shapes_make_no_programs_for_ever() -> None:
    """One client a round, all of different sizes: the first shape gets a program, rare ones do not."""
    data = tiny.federation((4, 8, 12, 16, 20))
    changes = {"data": data, "rounds": 8, "clients_per_round": 1, "train__local_steps": None, "train__local_epochs": 1}
    reference = tiny.play(tiny.plan("fedavg", engine__name="sequential", **changes))
    stayed = on_device("fedavg", **changes)
    assert stayed.seat is not None
    assert 1 <= len(stayed.seat.resident._exchanges) <= 2
    assert gap(reference, stayed) < 1e-10
