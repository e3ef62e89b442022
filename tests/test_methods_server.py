"""Rules of the server, through whole runs: weights by loss, own weights for statistics, optimizers on the server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from checks import EXACT, average, keys_of, only, spied
from fednorm.core.method import Phase
from fednorm.core.report import Report
from fednorm.core.state import Kind, Tree, digest
from fednorm.engines.sequential import SequentialEngine
from fednorm.halves.merging import merge_updates
from fednorm.halves.messages import Update
from fednorm.halves.training import Job, Outcome
from fednorm.methods import parse
from fednorm.running.plan import Plan
from fednorm.running.run import Run
from fednorm.running.store import Store

TRAINED = (Kind.WEIGHT, Kind.AFFINE)


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return bool(torch.allclose(left, right, rtol=0, atol=EXACT))


def trained(made: Plan, round: int, jobs: Sequence[Job]) -> list[Outcome]:
    """What the first phase of a plan makes of some clients' work in a round."""
    phase = made.phases[0]
    numbers = made.numbers(phase.id, round)
    return list(SequentialEngine(made).train(phase, [replace(job, numbers=numbers) for job in jobs]))


# -- FedBS --


@pytest.mark.parametrize("loss", ["last_epoch", "last_batch", "all"])
def test_i19_fedbs_weighs_weights_affine_and_statistics_by_loss(loss: str) -> None:
    made = tiny.plan(f"fedbs(loss={loss})", rounds=1)
    run, spy = spied(made)
    list(run.rounds())
    outcomes = spy.log[0].outcomes
    losses = [outcome.update.report.losses[loss] for outcome in outcomes]
    weights = [each / math.fsum(losses) for each in losses]
    assert max(weights) - min(weights) > 0.01
    for key in keys_of(made.prepared.entries, Kind.WEIGHT, Kind.AFFINE, Kind.STATISTIC):
        assert close(run.server.tree[key], average(outcomes, weights, key))
    assert run.server.tree[keys_of(made.prepared.entries, Kind.COUNTER)[0]].dtype == torch.int64


def test_i19_fedbs_switches_after_r_rounds_in_a_row_and_latches() -> None:
    def stages(method: str) -> list[int]:
        return [row["stage"] for row in tiny.play(tiny.plan(method, rounds=6)).store.rows()]

    assert stages("fedbs(eps=1e6,rounds=2)") == [0, 0, 1, 1, 1, 1]
    assert stages("fedbs(eps=1e6)") == [0, 0, 0, 0, 0, 1]
    assert stages("fedbs(eps=0.0)") == [0] * 6


def test_i19_the_count_of_fedbs_goes_on_after_a_resume(tmp_path: Path) -> None:
    """Round 3 counts the losses that round 2 reported: they are in the checkpoint, as the count is."""

    def made() -> Plan:
        return tiny.plan("fedbs(eps=1e6,rounds=3)", rounds=5)

    first = Store(tmp_path / "state.sqlite")
    reports = tiny.play(made(), first, rounds=2).server.reports
    first.close()
    again = Store(tmp_path / "state.sqlite")
    resumed = Run(made(), again)
    assert resumed.round == 2
    assert resumed.server.switch_memory == {"count": 1, "switched": False}
    assert resumed.server.reports == reports
    list(resumed.rounds())
    assert [row["stage"] for row in again.rows()] == [0, 0, 0, 1, 1]
    again.close()


def test_i19_after_the_switch_fedbs_is_fedprox_with_equal_weights() -> None:
    made = tiny.plan("fedbs(eps=1e6,rounds=1,mu=0.5)", rounds=2)
    run, spy = spied(made)
    list(run.rounds())
    first, second = spy.log
    for key in keys_of(made.prepared.entries, Kind.WEIGHT, Kind.AFFINE, Kind.STATISTIC):
        assert close(run.server.tree[key], average(second.outcomes, [1 / 3] * 3, key))
    fedprox = tiny.plan("fedprox(mu=0.5)", rounds=2)
    again = trained(fedprox, 2, second.jobs)
    assert [digest(o.update.shared) for o in again] == [digest(o.update.shared) for o in second.outcomes]
    plain = tiny.plan("fedavg", rounds=2)
    without = trained(plain, 1, first.jobs)
    assert [digest(o.update.shared) for o in without] == [digest(o.update.shared) for o in first.outcomes]


# -- FedDNA and pooled variances --


def test_feddna_by_size_is_fedavg_to_the_bit() -> None:
    ours, theirs = (tiny.fingerprint(tiny.play(tiny.plan(method))) for method in ("feddna(q=size)", "fedavg"))
    assert ours == theirs


@pytest.mark.parametrize("q", ["divergence", "uniform"])
def test_feddna_leaves_weights_and_affine_to_the_sizes(q: str) -> None:
    """In training BatchNorm does not read its running statistics, so only these may differ from FedAvg's."""
    made = tiny.plan(f"feddna(q={q})")
    ours, theirs = tiny.play(made).server.tree, tiny.play(tiny.plan("fedavg")).server.tree
    trained, statistics = keys_of(made.prepared.entries, *TRAINED), keys_of(made.prepared.entries, Kind.STATISTIC)
    assert digest(only(ours, trained)) == digest(only(theirs, trained))
    assert digest(only(ours, statistics)) != digest(only(theirs, statistics))


@pytest.mark.parametrize("model", ["feddna", "feddna+brn", "pooled", "pooled+brn"])
def test_identical_clients_leave_statistics_unchanged(model: str) -> None:
    made = tiny.plan(model)
    phase = made.phases[0]
    state = {key: value + 1 for key, value in made.initial().items()}
    same = [Update(Report(client, size), only(state, phase.shared)) for client, size in enumerate((3, 5, 9))]
    merged, _ = merge_updates(phase.phase, made.initial(), same, phase.schema, {})
    for key in keys_of(made.prepared.entries, Kind.STATISTIC, Kind.COUNTER):
        assert torch.allclose(merged[key], state[key], rtol=1e-15, atol=0)


def test_pooled_statistics_are_those_of_the_clients_mixture() -> None:
    made = tiny.plan("pooled", rounds=1)
    run, spy = spied(made)
    list(run.rounds())
    outcomes = spy.log[0].outcomes
    weights = [8 / 29, 12 / 29, 9 / 29]
    for mean_key in [entry.key for entry in made.prepared.entries if entry.part == "running_mean"]:
        var_key = mean_key.replace("running_mean", "running_var")
        mean = average(outcomes, weights, mean_key)
        second = sum(
            w * (o.update.shared[var_key] + o.update.shared[mean_key].square())
            for w, o in zip(weights, outcomes, strict=True)
        )
        assert close(run.server.tree[mean_key], mean)
        assert close(run.server.tree[var_key], second - mean.square())
        assert bool((run.server.tree[var_key] > average(outcomes, weights, var_key)).all())


# -- optimizers on the server --


def played(method: str) -> tuple[Plan, Run, list[dict[str, torch.Tensor]]]:
    """A run of three rounds, with the clients' mean of each trained tensor in each round."""
    made = tiny.plan(method, rounds=3, train__weights="uniform")
    run, spy = spied(made)
    list(run.rounds())
    keys = keys_of(made.prepared.entries, *TRAINED)
    return made, run, [{key: average(e.outcomes, [1 / 3] * 3, key) for key in keys} for e in spy.log]


def test_fedavgm_by_hand() -> None:
    made, run, means = played("fedavgm(lr=0.7,momentum=0.5)")
    for key in keys_of(made.prepared.entries, *TRAINED):
        x, velocity = made.initial()[key], torch.zeros(())
        for mean in means:
            velocity = 0.5 * velocity + (x - mean[key])
            x = x - 0.7 * velocity
        assert close(run.server.tree[key], x)


def test_fedadam_by_hand() -> None:
    made, run, means = played("fedadam(lr=0.05,beta1=0.8,beta2=0.9,tau=0.01)")
    for key in keys_of(made.prepared.entries, *TRAINED):
        x, first, second = made.initial()[key], torch.zeros(()), torch.full((), 0.01**2, dtype=torch.float64)
        for mean in means:
            delta = mean[key] - x
            first = 0.8 * first + 0.2 * delta
            second = 0.9 * second + 0.1 * delta.square()
            x = x + 0.05 * first / (second.sqrt() + 0.01)
        assert close(run.server.tree[key], x)


@pytest.mark.parametrize("method", ["fedavgm", "fedadam"])
def test_server_optimizers_leave_statistics_and_counters_to_the_mean(method: str) -> None:
    made = tiny.plan(method, rounds=3)
    run, spy = spied(made)
    list(run.rounds())
    last = spy.log[-1].outcomes
    for key in keys_of(made.prepared.entries, Kind.STATISTIC):
        assert close(run.server.tree[key], average(last, [8 / 29, 12 / 29, 9 / 29], key))
    for key in keys_of(made.prepared.entries, Kind.COUNTER):
        assert (int(run.server.tree[key]), run.server.tree[key].dtype) == (6, torch.int64)


def test_fedavgm_without_momentum_is_fedavg() -> None:
    ours, theirs = (tiny.play(tiny.plan(method)).server.tree for method in ("fedavgm(momentum=0.0)", "fedavg"))
    assert all(torch.allclose(ours[key], theirs[key], rtol=0, atol=1e-14) for key in theirs)


BATCH_NORM = tiny.plan("fedavg", model=tiny.conv_net())


def fifty_rounds(phase: Phase, variances: list[float]) -> list[Tree]:
    """The server's states while two clients report variances that swing, as they do early in training."""
    schema = BATCH_NORM.prepared.schema(phase, BATCH_NORM.optimizer)
    server, memory, states = BATCH_NORM.initial(), {}, []
    for round in range(50):
        updates = []
        for client in (0, 1):
            sent = {key: value.clone() for key, value in server.items()}
            sent["1.running_var"] = torch.full((4,), variances[(round + client) % len(variances)], dtype=torch.float64)
            updates.append(Update(Report(client, client + 1), sent))
        server, memory = merge_updates(phase, server, updates, schema, memory)
        states.append(server)
    return states


@settings(max_examples=10)
@given(st.lists(st.floats(0, 100), min_size=2, max_size=6), st.sampled_from(["fedavgm(lr=1.5)", "fedadam(lr=1.0)"]))
def test_no_server_optimizer_makes_a_variance_negative(variances: list[float], method: str) -> None:
    for state in fifty_rounds(parse(method).phases[0], variances):
        assert float(state["1.running_var"].min()) >= 0
        assert float(state["1.running_var"].max()) <= max(variances) * (1 + 1e-12)


@pytest.mark.parametrize("method", ["fedavgm(lr=1.5)", "fedadam(lr=1.0)"])
def test_on_statistics_it_would(method: str) -> None:
    phase = parse(method).phases[0]
    wrong = Phase(merge={**phase.merge, Kind.STATISTIC: phase.merge[Kind.WEIGHT]})
    assert min(float(state["1.running_var"].min()) for state in fifty_rounds(wrong, [0.01, 0.02])) < 0


@pytest.mark.parametrize("method", ["fedavgm", "fedadam"])
def test_the_memory_of_a_server_optimizer_survives_a_resume(method: str, tmp_path: Path) -> None:
    whole = tiny.play(tiny.plan(method))
    assert whole.server.held.memory
    first = Store(tmp_path / "state.sqlite")
    stopped = tiny.play(tiny.plan(method, engine__checkpoint_every=1), first, rounds=2)
    before = digest(stopped.server.held.memory)
    first.close()
    again = Store(tmp_path / "state.sqlite")
    resumed = Run(tiny.plan(method, engine__checkpoint_every=1), again)
    assert resumed.round == 2
    assert digest(resumed.server.held.memory) == before
    list(resumed.rounds())
    assert digest(resumed.server.tree) == digest(whole.server.tree)
    again.close()
