"""Rounds that the host merges: clients train by the same programs as elsewhere on the device, here on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from fednorm.core.method import Facts, Method
from fednorm.core.probe import Probe
from fednorm.core.reductions import weighted_sum
from fednorm.core.state import Kind, Tree
from fednorm.data.federation import Federation
from fednorm.engines.receiving import flaws_of_outcomes
from fednorm.engines.stack import phase_program
from fednorm.engines.stack.kernels.layers import use_kernels
from fednorm.engines.stack.slot import StackSlot
from fednorm.errors import QuorumError
from fednorm.methods import parse
from fednorm.pieces.changes import merge_by
from fednorm.running.plan import Plan
from fednorm.running.run import Run
from fednorm.running.store import Store
from test_stacked import assert_same_clients, gap
from trained_how import Used, count_training

EQUAL, UNEQUAL = tiny.federation((8, 8, 8)), tiny.federation((7, 14, 11, 3))
EPOCHS = {"train__local_steps": None, "train__local_epochs": 2}
METHODS = ("fedavg", "fedbn", "silobn(report=true)", "fixbn", "fedadam", "local-momentum", "gn", "fedprox", "hbn")
QUORUM = {"engine__quorum": 0.5}
BOTH = pytest.mark.parametrize("kind", ["equal", "unequal"])


@pytest.fixture(autouse=True)
def stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fednorm.engines.stack.slot.DEVICES", {"cpu"})


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Used:
    return count_training(monkeypatch.setattr)


def changes(kind: str, **others: Any) -> dict[str, Any]:
    own: dict[str, Any] = {"data": EQUAL, "train__local_steps": 3}
    own = own if kind == "equal" else {"data": UNEQUAL, **EPOCHS}
    return {"rounds": 4, "train__lr": 0.02, "eval__every": 2, **own, **others}


def both(method: str | Method, **others: Any) -> tuple[Run, Run]:
    """The reference, and the same with programs whose rounds the host merges."""
    plans = [tiny.plan(method, engine__name=name, **others) for name in ("sequential", "stacked")]
    reference, stacked = map(tiny.play, plans)
    assert isinstance(stacked.server.held, StackSlot)
    return reference, stacked


def merged_on_the_host(plan: Plan) -> Run:
    """The run of a plan whose merges cannot be programs."""
    run = Run(plan, Store())
    assert isinstance(run.server.held, StackSlot)
    run.server.held.stack.unjudged.update(phase.id for phase in plan.phases)
    list(run.rounds())
    return run


def assert_same(reference: Run, stacked: Run) -> None:
    assert gap(reference, stacked) < 1e-10
    assert_same_clients(reference, stacked)
    for row, wanted in zip(stacked.store.rows(), reference.store.rows(), strict=True):
        assert row.keys() == wanted.keys()
        assert row["train_loss"] == pytest.approx(wanted["train_loss"], rel=1e-9)
        assert row.get("refused") == wanted.get("refused")


@BOTH
@pytest.mark.parametrize("method", METHODS)
def test_rounds_with_a_quorum_are_trained_by_programs(method: str, kind: str, used: Used) -> None:
    reference, stacked = both(method, **changes(kind, **QUORUM))
    assert_same(reference, stacked)
    assert used["programs"] == used["merged there"] >= len(list(reference.store.rows()))
    assert not used["step by step"]
    used.clear()
    assert_same(reference, merged_on_the_host(tiny.plan(method, engine__name="stacked", **changes(kind, **QUORUM))))
    assert used.keys() == {"programs"}


def test_filters_that_lie_as_kernels_read_them_are_handed_out_too(used: Used) -> None:
    own = changes("equal", engine__quorum=0.5)
    reference = tiny.play(tiny.plan("fedbn", **own))
    plan = tiny.plan("fedbn", engine__name="stacked", **own)
    assert use_kernels(plan.prepared.model)
    assert_same(reference, merged_on_the_host(plan))
    assert used == {"programs": 4}


def spoilt(data: Federation, client: int) -> Federation:
    """The data of one client are such that sums over them are not finite."""
    x = data.x.clone()
    x[data.clients[client]] = 1e308
    return replace(data, x=x)


@BOTH
@pytest.mark.parametrize("method", ["fedavg", "fedbn", "silobn(report=true)", "fedadam", "local-momentum"])
def test_a_client_that_cannot_be_used_is_left_out_and_keeps_its_state(method: str, kind: str, used: Used) -> None:
    own = changes(kind, engine__quorum=0.5)
    reference, stacked = both(method, **{**own, "data": spoilt(own["data"], 1)})
    assert_same(reference, stacked)
    assert all(set(row["refused"]) == {"1"} for row in stacked.store.rows())
    assert 1 not in stacked.store.seen()
    assert used == {"programs": 4}


def test_below_the_quorum_a_run_ends_after_its_retries(used: Used) -> None:
    own = changes("equal", engine__quorum=0.9, engine__retries=2, data=spoilt(EQUAL, 1))
    ends: list[str] = []
    for name in ("sequential", "stacked"):
        with pytest.raises(QuorumError) as caught:
            tiny.play(tiny.plan("fedbn", engine__name=name, **own))
        ends.append(str(caught.value))
    assert ends[0] == ends[1]
    assert used == {"programs": 1, "step by step": 2}  # one client alone is a shape that comes too seldom


@pytest.mark.parametrize("name", ["sequential", "stacked"])
def test_an_attempt_that_succeeds_goes_on_with_what_the_others_did(
    name: str, used: Used, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Client 1 cannot be used in the first attempts of two rounds."""
    own = changes("equal", engine__quorum=1.0, engine__retries=1)
    plain = tiny.play(tiny.plan("fedbn", **own))
    looks = [0]

    def refused(*args: Any) -> dict[int, str]:
        looks[0] += 1
        return {1: "it was disturbed"} if looks[0] in (1, 3) else flaws_of_outcomes(*args)

    monkeypatch.setattr("fednorm.engines.base.flaws_of_outcomes", refused)
    plan = tiny.plan("fedbn", engine__name=name, **own)
    run = tiny.play(plan) if name == "sequential" else merged_on_the_host(plan)
    assert_same_clients(plain, run)
    assert gap(plain, run) < 1e-10
    assert [row.get("retried") for row in run.store.rows()] == [1, 1, None, None]
    assert used == ({"programs": 4, "step by step": 2} if name == "stacked" else {})


def test_a_cohort_that_fails_as_a_whole_is_trained_client_by_client(used: Used) -> None:
    """A measure fails for one client: the others count."""

    def clumsy() -> Method:
        taken = [0]

        def measure(end: Tree, start: Tree, facts: Facts) -> Tensor:
            taken[0] += 1
            if taken[0] in (2, 4, 5):  # client 1: with all, alone in a stack, and alone
                raise ValueError("a ruler broke")
            return torch.ones(())

        return parse("fedavg").map_phases(lambda phase: replace(phase, measures={"length": measure}))

    own = changes("equal", engine__quorum=0.5)
    stacked = merged_on_the_host(tiny.plan(clumsy(), engine__name="stacked", **own))
    first, *others = stacked.store.rows()
    assert list(first["refused"]) == ["1"]
    assert "a ruler broke" in first["refused"]["1"]
    assert not any("refused" in row for row in others)
    assert [stacked.store.get(client).steps for client in range(3)] == [12, 9, 12]
    assert used["programs"] == 4


@BOTH
@pytest.mark.parametrize("method", ["silobn(report=true)", "fedbn(report=true)", "tracker"])
def test_reported_entries_stay_on_the_device_altogether(method: str, kind: str, used: Used) -> None:
    reference, stacked = both(method, **changes(kind))
    assert_same(reference, stacked)
    assert used["merged there"] == 4
    assert not used["step by step"]


PROBES = ("grad-norm", "drift", "running-var", "batch-shift", "global-shift", "client-spread")


@pytest.mark.parametrize("quorum", [None, 0.5])
@BOTH
@pytest.mark.parametrize("method", ["fedprox", "fedbn", "decoupled"])
def test_probes_look_into_programs(method: str, kind: str, quorum: float | None, used: Used) -> None:
    own = changes(kind, rounds=6, eval__probes=PROBES, eval__probe_every=2, engine__quorum=quorum)
    reference, stacked = both(method, **own)
    assert_same(reference, stacked)
    assert not used["step by step"]
    for row, wanted in zip(stacked.store.rows(), reference.store.rows(), strict=True):
        assert ("probes" in row) == (row["round"] % 2 == 0)
        for phase, clients in wanted.get("probes", {}).items():
            for client, seen in clients.items():
                assert row["probes"][phase][client] == pytest.approx(seen, rel=1e-8)
        for phase, seen in wanted.get("round_probes", {}).items():
            assert row["round_probes"][phase] == pytest.approx(seen, rel=1e-8)


def with_probe(plan: Plan, probe: Probe) -> Plan:
    return replace(plan, probes=(*plan.probes, probe))


def test_a_probe_that_cannot_be_mapped_leaves_other_rounds_alone(
    used: Used, capsys: pytest.CaptureFixture[str]
) -> None:
    def curious(grads: Tree, before: Any, after: Any, facts: Facts) -> Tensor:
        first = next(iter(grads.values())).sum()
        return first if float(first) > 0 else -first

    probe = Probe("curious", "looks at values", see=curious)
    own = changes("equal", eval__probes=("grad-norm",), eval__probe_every=2)
    plans = [with_probe(tiny.plan("fedavg", engine__name=name, **own), probe) for name in ("sequential", "stacked")]
    reference, stacked = map(tiny.play, plans)
    assert_same(reference, stacked)
    assert used["merged there"] == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("stacked engine: 'train' is stacked step by step where probes look (vmap: ")
    assert second.endswith("using sequential")


def test_what_cannot_be_a_program_is_stacked_step_by_step(
    used: Used, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*args: object) -> None:
        raise ValueError("out of resource")

    monkeypatch.setattr(phase_program, "Program", fails)
    reference, stacked = both("fedbn", **changes("equal", engine__quorum=0.5))
    assert_same(reference, stacked)
    assert used["step by step"] == 4
    (line,) = capsys.readouterr().err.splitlines()
    wanted = "rounds cannot stay on the device (out of resource); clients are stacked step by step"
    assert line == f"stacked engine: {wanted}"


def looked_at(old: Tree, clients: Tree, weights: Tensor, memory: Tree) -> tuple[Tree, Tree]:
    """A mean that looks at values, which no program can."""
    factor = 0.5 if float(next(iter(clients.values())).sum()) > 1e9 else 1.0
    return {part: factor * weighted_sum(clients[part], weights).to(old[part].dtype) for part in old}, memory


def test_a_merge_that_cannot_be_a_program_is_the_hosts(used: Used, capsys: pytest.CaptureFixture[str]) -> None:
    method = merge_by(looked_at, Kind.WEIGHT)(parse("fedavg"))
    assert_same(*both(method, **changes("equal", **QUORUM)))
    assert used == {"programs": 4}
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("stacked engine: 'train' is merged on the host (")


@pytest.mark.parametrize("quorum", [None, 0.5])
def test_what_has_no_program_is_played_as_before(quorum: float | None) -> None:
    assert_same(*both("fedtan", **changes("equal", engine__quorum=quorum)))


@pytest.mark.parametrize("quorum", [None, 0.5])
@pytest.mark.parametrize("method", ["centralized", "union with a state of its own"])
def test_what_the_union_keeps_has_a_row_too(method: str, quorum: float | None, used: Used) -> None:
    own = replace(parse("fedbn"), data="union") if method.startswith("union") else parse(method)
    assert_same(*both(own, **changes("equal", engine__quorum=quorum)))
    assert not used["step by step"]


@BOTH
@pytest.mark.parametrize("method", ["fedbn", "fedadam", "silobn(report=true)"])
def test_a_run_with_a_quorum_goes_on_to_the_same_bits(method: str, kind: str, used: Used) -> None:
    own = changes(kind, rounds=6, engine__name="stacked", engine__quorum=0.5)
    own["data"] = spoilt(own["data"], 2)
    whole = tiny.play(tiny.plan(method, **own))
    first = tiny.play(tiny.plan(method, **own), rounds=3)
    second = tiny.play(first.plan, first.store)
    assert tiny.fingerprint(second) == tiny.fingerprint(whole)
    assert used["programs"] == 12
    assert not used["step by step"]


def test_sampled_cohorts_of_ever_new_shapes_go_on_to_the_same_bits(used: Used) -> None:
    data = tiny.federation((4, 8, 12))
    own = {"data": data, "rounds": 9, "clients_per_round": 1, "train__lr": 0.02, "engine__quorum": 0.5}
    own |= {"engine__name": "stacked", "train__local_steps": None, "train__local_epochs": 1}
    whole = tiny.play(tiny.plan("fedbn", **own))
    assert used["programs"]
    assert used["step by step"]
    first = tiny.play(tiny.plan("fedbn", **own), rounds=5)
    assert tiny.fingerprint(tiny.play(first.plan, first.store)) == tiny.fingerprint(whole)
