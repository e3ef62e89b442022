"""Probes: what they say about a step, a client's work and a merge, worked by hand; equal in every engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import tiny
from fednorm.core.probe import Merged, told
from fednorm.core.state import Kind, Tree
from fednorm.core.step import Carry
from fednorm.errors import ConfigError
from fednorm.halves.prepared import facts_of
from fednorm.running.probe_curves import probe_curve, probe_variance
from fednorm.running.run import Run
from fednorm.running.store import Store
from fednorm.scoring.probes import PROBES, find_probes

TREE = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
ZERO = {key: torch.zeros_like(value) for key, value in TREE.items()}
OF_STATISTICS = ("statistics-shift", "mean-shift", "var-shift", "batch-shift", "global-shift", "client-spread")


def see(name: str, grads: Tree = ZERO, new: Tree = ZERO, anchor: Tree = ZERO, state: Tree | None = None) -> float:
    """What a probe sees of a step with these gradients, which led from zeros to these parameters and this state."""
    net = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    before = Carry(params=ZERO, state={}, optimizer={}, extras={}, anchor=anchor)
    after = before._replace(params=new, state=state or {})
    look = PROBES[name].see
    assert look is not None
    return float(look(grads, before, after, facts_of(net)))


def test_norms_run_over_all_tensors() -> None:
    assert see("grad-norm", grads=TREE) == 5.0
    assert see("drift", new=TREE) == 5.0
    assert see("drift", new=TREE, anchor=TREE) == 0.0


def test_statistics_are_averaged_over_channels() -> None:
    state = {"0.running_mean": torch.tensor([1.0, 3.0]), "1.running_mean": torch.tensor([5.0, 7.0])}
    state |= {"0.running_var": torch.tensor([2.0, 2.0]), "1.running_var": torch.tensor([4.0, 4.0])}
    assert see("running-mean", state=state) == 4.0
    assert see("running-var", state=state) == 3.0
    assert see("running-var") == 0.0


def test_the_shift_of_a_clients_work_is_a_mean_over_channels() -> None:
    facts = facts_of(nn.BatchNorm1d(2))
    start = {"running_mean": torch.tensor([1.0, -1.0]), "running_var": torch.tensor([1.0, 1.0])}
    end = {"running_mean": torch.tensor([2.0, -4.0]), "running_var": torch.tensor([1.5, 0.5])}
    shifts = find_probes(("statistics-shift", "mean-shift", "var-shift"))
    assert told(shifts, {}, end, start, facts) == {"statistics-shift": 1.25, "mean-shift": 2.0, "var-shift": 0.5}
    without = facts_of(nn.Linear(2, 2))
    assert told(shifts, {}, {}, {}, without) == {"statistics-shift": 0.0, "mean-shift": 0.0, "var-shift": 0.0}


def test_the_statistics_of_the_last_batch_are_found_in_the_running_ones() -> None:
    """Momentum 0.1 takes a tenth of the batch's: from 1 and a batch of 3 to 1.2."""
    (probe,) = find_probes(("batch-shift",))
    layer = nn.BatchNorm1d(2).double()
    facts, start = facts_of(layer), {key: value.clone() for key, value in layer.state_dict().items()}
    x = torch.tensor([[1.0, 2.0], [3.0, 6.0], [5.0, 1.0]], dtype=torch.float64)
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    layer(x)
    assert probe.see is not None
    carries = (Carry({}, state, {}, {}, {}) for state in (before, dict(layer.state_dict())))
    seen = probe.see({}, *carries, facts)
    assert seen.tolist() == pytest.approx([3, 3, 4, 7])  # means, then variances as torch records them: over n - 1
    assert told((probe,), {"batch-shift": seen}, dict(layer.state_dict()), start, facts) == {
        "batch-shift": pytest.approx((3 + 3 + 3 + 6) / 4)
    }


def test_a_step_that_only_observes_shows_nothing_of_a_step() -> None:
    facts = facts_of(nn.BatchNorm1d(1))
    state = {"running_mean": torch.zeros(1), "running_var": torch.ones(1)}
    found = told(find_probes(("grad-norm", "batch-shift", "statistics-shift")), {}, state, state, facts)
    assert found == {"statistics-shift": 0.0}


def test_a_merge_is_seen_as_one_number_a_probe() -> None:
    merged = Merged(torch.tensor([0.0, 1.0]), torch.tensor([2.0, 1.0]), torch.tensor([0.5, 1.5]))
    shift, spread = (PROBES[name].join for name in ("global-shift", "client-spread"))
    assert shift is not None
    assert spread is not None
    assert (float(shift(merged)), float(spread(merged))) == (1.0, 1.0)
    nothing = Merged(*[torch.zeros(0)] * 3)
    assert (float(shift(nothing)), float(spread(nothing))) == (0.0, 0.0)


def probed(method: str = "fedavg", store: Store | None = None, rounds: int | None = None, **changes: Any) -> Run:
    named = {"eval__probes": list(OF_STATISTICS), "eval__every": 4, **changes}
    return tiny.play(tiny.plan(method, **named), store, rounds)


def test_what_a_run_records_by_hand() -> None:
    """One step of one round: clients' statistics are read from what they would have sent."""
    run = probed(rounds=1, train__local_steps=1, train__weights="uniform")
    row = next(iter(run.store.rows()))
    entries = run.plan.prepared.facts.entries
    keys = [key for key, entry in entries.items() if entry.kind is Kind.STATISTIC]
    alone = [tiny.play(tiny.plan("fedavg", rounds=1, train__local_steps=1, data=data)) for data in one_by_one(run)]
    each = torch.stack([torch.cat([single.server.tree[key] for key in keys]) for single in alone])
    start = torch.cat([run.plan.prepared.initial[key] for key in keys])
    assert row["round_probes"]["train"]["client-spread"] == pytest.approx(float(each.var(0, correction=0).mean()))
    assert row["round_probes"]["train"]["global-shift"] == pytest.approx(float((each.mean(0) - start).abs().mean()))
    for client, own in row["probes"]["train"].items():
        shift = float((each[int(client)] - start).abs().mean())
        assert own["statistics-shift"] == pytest.approx(shift)
        assert own["batch-shift"] == pytest.approx(10 * shift)  # a tenth of a batch goes into the running ones
        assert own["statistics-shift"] == pytest.approx((own["mean-shift"] + own["var-shift"]) / 2)


def one_by_one(run: Run) -> list[Any]:
    """The same federation, of which one client alone trains."""
    data = run.plan.federation
    return [replace(data, unseen=frozenset(range(3)) - {client}) for client in range(3)]


def rows_of(run: Run) -> list[Any]:
    return [{key: row[key] for key in ("probes", "round_probes")} for row in run.store.rows()]


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "fixbn(at=2)"])
def test_looking_changes_nothing_and_is_the_same_everywhere(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blind, seen = tiny.play(tiny.plan(method, eval__every=4)), probed(method)
    assert tiny.fingerprint(blind)["server"] == tiny.fingerprint(seen)["server"]
    monkeypatch.setattr("fednorm.engines.stack.slot.DEVICES", {"cpu"})
    assert_close(rows_of(seen), rows_of(probed(method, engine__name="stacked")))
    store = Store()
    probed(method, store, rounds=2)
    assert tiny.fingerprint(probed(method, store)) == tiny.fingerprint(seen)


@pytest.mark.slow
def test_processes_see_the_same_bits() -> None:
    assert tiny.fingerprint(probed("fedbn", **tiny.engine("workers"))) == tiny.fingerprint(probed("fedbn"))


def assert_close(left: Any, right: Any) -> None:
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_close(left[key], right[key])
    elif isinstance(left, list):
        for one, other in zip(left, right, strict=True):
            assert_close(one, other)
    else:
        assert left == pytest.approx(right, rel=1e-6, abs=1e-10)


def test_frozen_statistics_stand_still() -> None:
    last = list(probed("fixbn(at=2)").store.rows())[-1]
    assert last["stage"] == 1
    assert last["round_probes"]["train"] == {"global-shift": 0.0, "client-spread": 0.0}
    for own in last["probes"]["train"].values():
        assert own == pytest.approx(dict.fromkeys(OF_STATISTICS[:4], 0.0), abs=1e-12)


def test_curves_are_means_over_clients_and_variances_over_rounds() -> None:
    rows = [
        {**tiny.row(number), "probes": {"train": {"0": {"d": own}, "1": {"d": 2 * own}}}}
        for number, own in enumerate([1.0, 3.0, 2.0], 1)
    ]
    rows[1]["round_probes"] = {"train": {"g": 0.25}}
    assert probe_curve(rows, "d") == ([1, 2, 3], [1.5, 4.5, 3.0])
    assert probe_curve(rows, "g") == ([2], [0.25])
    # Of 1, 3 and 3, 2: variances 1 and 0.25, of the second client four times that.
    assert probe_variance(rows, "d", 2) == ([2, 3], [2.5, 0.625])
    assert probe_curve(rows, "nothing") == ([], [])


def test_a_run_records_them_every_so_many_rounds() -> None:
    run = tiny.play(tiny.plan("fedavg", rounds=4, eval__probes=["drift"], eval__probe_every=2))
    rows = list(run.store.rows())
    assert ["probes" in row for row in rows] == [False, True, False, True]
    assert not any("round_probes" in row for row in rows)
    assert set(rows[1]["probes"]["train"]) == {"0", "1", "2"}
    assert all(seen["drift"] > 0 for seen in rows[1]["probes"]["train"].values())


def test_an_unknown_probe_is_refused() -> None:
    with pytest.raises(ConfigError) as refusal:
        find_probes(("grad-nrom",))
    assert str(refusal.value) == "probe 'grad-nrom' is not known; did you mean 'grad-norm'?"
