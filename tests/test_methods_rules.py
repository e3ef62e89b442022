"""What travels, what stays and what moves in the methods with exchanges, statistics or layers of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tiny
from checks import EXACT, WHOLE_BATCHES, average, centralized_sgd, distance, keys_of, only, spied, warmed_up
from fednorm.core.state import Kind, Tree, digest
from fednorm.errors import ConfigError
from fednorm.methods import parse
from fednorm.pieces.moments import inputs_of_norms
from fednorm.running.plan import Plan
from fednorm.running.run import Run
from fednorm.running.store import Store

WHOLE_EPOCHS = {"data": tiny.federation((8, 12, 6)), "train__local_steps": None, "train__local_epochs": 1}
TRAINED = (Kind.WEIGHT, Kind.AFFINE)


def close(left: Tensor, right: Tensor) -> bool:
    return bool(torch.allclose(left, right, rtol=0, atol=EXACT))


def first_norm(made: Plan, state: Tree, x: Tensor) -> tuple[str, Tensor, Tensor]:
    """Name of the first batch norm, with mean and variance of what enters it when the model sees all of x."""
    model = made.prepared.model.eval()
    with torch.no_grad(), inputs_of_norms(model) as seen:
        torch.func.functional_call(model, only(state, made.prepared.facts.entries), (x,))
    name, inputs = next(iter(seen.items()))
    flat = inputs.transpose(0, 1).flatten(1)
    return name, flat.mean(1), flat.var(1, correction=0)


# -- what travels --

ALL = {Kind.WEIGHT, Kind.AFFINE, Kind.STATISTIC, Kind.COUNTER}
SENT = {
    "brn": [ALL],
    "fedtan": [ALL],
    "fedbs": [ALL],
    "feddna": [ALL],
    "pooled": [ALL],
    "fedavgm": [ALL],
    "fbn": [ALL],
    "fednn": [ALL | {Kind.EXTRA}],
    "sbn": [{Kind.WEIGHT, Kind.AFFINE}, {Kind.STATISTIC, Kind.COUNTER}],
    "posthoc": [ALL, {Kind.STATISTIC, Kind.COUNTER}],
    "decoupled": [{Kind.STATISTIC, Kind.COUNTER}, {Kind.WEIGHT, Kind.AFFINE}],
    "hbn": [{Kind.STATISTIC, Kind.COUNTER}, {Kind.WEIGHT, Kind.AFFINE}, {Kind.STATISTIC, Kind.COUNTER}],
    "global-momentum": [ALL | {Kind.OPTIMIZER}],
    "local-momentum": [ALL],
    "fedwon": [{Kind.WEIGHT}],
    "fixup": [{Kind.WEIGHT}],
    "nonorm": [{Kind.WEIGHT}],
    "gn+ws": [{Kind.WEIGHT, Kind.AFFINE}],
    "fn": [ALL],
    "adabn": [ALL],
    "tsmobn": [ALL],
}


@pytest.mark.parametrize(("method", "exchanges"), SENT.items())
def test_kinds_that_clients_send_in_each_exchange(method: str, exchanges: list[set[Kind]]) -> None:
    made = tiny.plan(method, rounds=1, data=tiny.federation((8, 8)))
    run, spy = spied(made)
    (row,) = run.rounds()
    sent = [{e.phase.schema[key][0].kind for key in e.outcomes[0].update.shared} for e in spy.log]
    assert sent == exchanges
    if method != "fedtan":
        assert row["exchanges"] == len(exchanges)


KEPT = {"local-momentum": {Kind.OPTIMIZER}, "hbn": {Kind.EXTRA}, "global-momentum": set(), "fbn": set(), "fednn": set()}


@pytest.mark.parametrize(("method", "kinds"), KEPT.items())
def test_kinds_that_clients_keep(method: str, kinds: set[Kind]) -> None:
    made = tiny.plan(method, rounds=1)
    run = tiny.play(made)
    schema = made.evaluated(0).schema
    assert {schema[key][0].kind for key in run.store.get(0).tree} == kinds


@pytest.mark.parametrize("method", ["brn", "fednn", "fedtan", "silobn", "fixbn", "posthoc"])
def test_counters_count_the_steps_of_the_whole_training(method: str) -> None:
    made = tiny.plan(method, rounds=4, data=tiny.federation((8, 8, 8)))
    run = tiny.play(made)
    counters = [e.key for e in made.prepared.entries if e.part == "num_batches_tracked"]
    expected = {"fixbn": 4, "posthoc": 2}.get(method, 8)  # frozen after two rounds; counted anew over one epoch
    for key in counters:
        value = run.store.get(0).tree.get(key, run.server.tree[key])
        assert (int(value), value.dtype) == (expected, torch.int64)


def test_batch_renorm_leaves_its_warm_up_by_the_counter_that_travels() -> None:
    """A round has 2 steps, the warm-up 0.31 * 8: only a counter that outlives the round can pass it."""

    def weights(method: str, rounds: int) -> str:
        run = tiny.play(tiny.plan(method, rounds=4, data=tiny.federation((8, 8, 8))), rounds=rounds)
        return digest(only(run.server.tree, keys_of(run.plan.prepared.entries, Kind.WEIGHT)))

    ramped, plain = "brn(momentum=0.3)", "brn(momentum=0.3,r_max=1.0,d_max=0.0)"
    assert weights(ramped, 1) == weights(plain, 1)
    assert weights(ramped, 2) != weights(plain, 2)


# -- decoupled update --


def test_decoupled_moves_statistics_first_and_then_the_rest_on_the_same_batches() -> None:
    made = tiny.plan("decoupled", rounds=2)
    run, spy = spied(made)
    statistics = keys_of(made.prepared.entries, Kind.STATISTIC, Kind.COUNTER)
    trained = keys_of(made.prepared.entries, *TRAINED)
    list(run.rounds())
    for look, train in zip(spy.log[0::2], spy.log[1::2], strict=True):
        assert [(j.client, j.first_batch, j.num_steps) for j in look.jobs] == [
            (j.client, j.first_batch, j.num_steps) for j in train.jobs
        ]
        for before, between in zip(look.jobs, train.jobs, strict=True):
            assert digest(only(before.start, trained)) == digest(only(between.start, trained))
            assert digest(only(before.start, statistics)) != digest(only(between.start, statistics))
    # Held statistics are not sent, and are at the end of a round what they were in its middle.
    assert digest(only(spy.log[2].jobs[0].start, statistics)) == digest(only(spy.log[1].jobs[0].start, statistics))
    assert digest(only(spy.log[2].jobs[0].start, trained)) != digest(only(spy.log[1].jobs[0].start, trained))


def test_the_first_exchange_of_decoupled_is_the_statistics_of_fedavg() -> None:
    """With W and A fixed one training-mode pass moves S as FedAvg's first step does, before the server averages."""
    decoupled, fedavg = (tiny.plan(method, **WHOLE_BATCHES, rounds=1) for method in ("decoupled", "fedavg"))
    keys = keys_of(fedavg.prepared.entries, Kind.STATISTIC)
    assert distance(only(tiny.play(decoupled).server.tree, keys), only(tiny.play(fedavg).server.tree, keys)) < EXACT


def test_the_second_exchange_of_decoupled_is_centralized_sgd_with_held_statistics() -> None:
    made = tiny.plan("decoupled", rounds=1, train__momentum=0.0, **WHOLE_BATCHES)
    run, spy = spied(made)
    list(run.rounds())
    made.prepared.model.load_state_dict(only(spy.log[1].jobs[0].start, made.prepared.facts.entries), strict=False)
    assert distance(run.server.tree, centralized_sgd(made, hold=frozenset({Kind.STATISTIC}))) < EXACT


# -- FixBN's sliding window --


def test_the_window_rule_reports_how_far_statistics_moved_and_switches_once_settled() -> None:
    made = tiny.plan("fixbn(at=window,window=2,tau=1e6)", rounds=5)
    run, spy = spied(made)
    rows = list(run.rounds())
    assert [row["stage"] for row in rows] == [0, 0, 1, 1, 1]
    statistics = keys_of(made.prepared.entries, Kind.STATISTIC)
    for exchange in spy.log[:2]:
        for job, outcome in zip(exchange.jobs, exchange.outcomes, strict=True):
            moved = [(outcome.update.shared[key] - job.start[key]).abs() for key in statistics]
            assert outcome.update.report.scalars["shift"] == pytest.approx(float(torch.cat(moved).mean()), rel=1e-14)
    assert all(outcome.update.report.scalars == {} for exchange in spy.log[2:] for outcome in exchange.outcomes)


def test_the_window_rule_needs_a_whole_window_and_a_small_spread() -> None:
    def stages(options: str) -> list[int]:
        return [row["stage"] for row in tiny.play(tiny.plan(f"fixbn(at=window,{options})", rounds=5)).store.rows()]

    assert stages("window=4,tau=1e6") == [0, 0, 0, 0, 1]
    assert stages("window=2,tau=1e-12") == [0] * 5
    assert stages("window=2,tau=1e6,center=mean,reduce=mean") == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("cohort", [None, 2])
def test_the_window_survives_a_resume(tmp_path: Path, cohort: int | None) -> None:
    def made() -> Plan:
        return tiny.plan("fixbn(at=window,window=3,tau=1e6)", rounds=5, clients_per_round=cohort)

    expected = tiny.fingerprint(tiny.play(made()))
    assert expected["rows"][-1]["stage"] == 1
    for stop in (2, 4):  # in the middle of the first window, and after the switch
        path = tmp_path / f"{stop}.sqlite"
        first = Store(path)
        tiny.play(made(), first, rounds=stop)
        first.close()
        again = Store(path)
        resumed = Run(made(), again)
        assert resumed.round == stop
        list(resumed.rounds())
        assert tiny.fingerprint(resumed) == expected
        again.close()


def test_the_window_is_the_same_in_every_engine_when_clients_rest() -> None:
    def told(engine: str) -> Mapping[str, list[list[float]]]:
        made = tiny.plan("fixbn(at=window,window=3,tau=1e-12)", rounds=5, clients_per_round=2, **tiny.engine(engine))
        return tiny.play(made).server.switch_memory["told"]

    expected = told("sequential")
    assert sorted(len(rows) for rows in expected.values()) == [1, 2, 3]
    assert {row[0] for rows in expected.values() for row in rows} == {2, 3, 4}
    assert told("workers") == expected
    for client, rows in told("stacked").items():
        assert rows == [[number, pytest.approx(value, rel=1e-9)] for number, value in expected[client]]


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        (
            "fixbn(at=window,window=1)",
            "window=1, tau=0.0001 cannot be a rule; give a window of 2 or more and tau above 0",
        ),
        (
            "fixbn(statistics=false)",
            "fixbn with statistics=false and affine=false would freeze nothing; set one of them to true",
        ),
        (
            "fixbn(tau=0.1)",
            "window, tau, center and reduce belong to the sliding-window rule; give at=window or leave them out",
        ),
        (
            "fixbn(at=later)",
            "'fixbn(at=later)': 'later' does not fit; at takes a number or 'window'",
        ),
    ],
)
def test_fixbn_names_what_cannot_be(expression: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse(expression)
    assert str(refusal.value) == message


# -- statistics after training --


@pytest.mark.parametrize("mode", ["federated", "ema", "cumulative"])
def test_i17_posthoc_changes_statistics_alone(mode: str) -> None:
    made = tiny.plan(f"posthoc(mode={mode})", **WHOLE_EPOCHS)
    ours, plain = tiny.play(made).server.tree, tiny.play(tiny.plan("fedavg", **WHOLE_EPOCHS)).server.tree
    trained, statistics = keys_of(made.prepared.entries, *TRAINED), keys_of(made.prepared.entries, Kind.STATISTIC)
    assert digest(only(ours, trained)) == digest(only(plain, trained))
    assert digest(only(ours, statistics)) != digest(only(plain, statistics))


@pytest.mark.parametrize("method", ["posthoc", "sbn", "fixbn+posthoc", "centralized+posthoc"])
def test_i17_pooled_statistics_are_the_moments_of_all_data(method: str) -> None:
    made = tiny.plan(method, **WHOLE_EPOCHS)
    server = tiny.play(made).server.tree
    name, mean, var = first_norm(made, server, made.federation.x)
    assert close(server[f"{name}.running_mean"], mean)
    assert close(server[f"{name}.running_var"], var)


def test_i17_batch_renorm_gets_the_deviation_with_its_eps() -> None:
    made = tiny.plan("brn+posthoc", **WHOLE_EPOCHS)
    server = tiny.play(made).server.tree
    name, mean, var = first_norm(made, server, made.federation.x)
    assert close(server[f"{name}.running_mean"], mean)
    assert close(server[f"{name}.running_std"], (var + 1e-5).sqrt())


def test_i17_holds_when_training_stopped_in_the_middle_of_an_epoch() -> None:
    made = tiny.plan("posthoc", data=tiny.federation((8, 12, 6)), train__local_steps=1, rounds=1)
    server = tiny.play(made).server.tree
    name, mean, _ = first_norm(made, server, made.federation.x)
    assert close(server[f"{name}.running_mean"], mean)


@pytest.mark.parametrize("method", ["sbn", "sbn(query_mode=cumulative)", "hbn", "hbn+local-momentum"])
def test_a_query_does_not_change_training(method: str) -> None:
    often, once = (tiny.play(tiny.plan(method, rounds=4, eval__every=every)) for every in (1, 4))
    assert digest(often.server.tree) == digest(once.server.tree)
    for client in (0, 1, 2):
        assert digest(often.store.get(client).tree) == digest(once.store.get(client).tree)
    rows = list(often.store.rows())
    assert all("eval" in row for row in rows)
    assert rows[0]["bytes_up"] < rows[-1]["bytes_up"] or "cumulative" in method  # only the last query is a cost


def test_static_batch_norm_trains_as_fedavg_with_equal_weights() -> None:
    sbn, fedavg = tiny.plan("sbn"), tiny.plan("fedavg", train__weights="uniform")
    trained = keys_of(fedavg.prepared.entries, *TRAINED)
    assert distance(only(tiny.play(sbn).server.tree, trained), only(tiny.play(fedavg).server.tree, trained)) < EXACT


# -- statistics that the server keeps moving --


@pytest.mark.parametrize(("options", "first"), [("ema=0.2", 1.0), ("ema=0.2,first=0.2", 0.2)])
def test_fbn_folds_the_pooled_moments_of_the_batches_into_the_shared_statistics(options: str, first: float) -> None:
    made = tiny.plan(f"fbn({options})", rounds=3)
    run, spy = spied(made)
    list(run.rounds())
    layers = [e.layer for e in made.prepared.entries if e.part == "batch_mean"]
    assert layers
    for layer in layers:
        mean, var = (made.initial()[f"{layer}.running_{part}"] for part in ("mean", "var"))
        for number, exchange in enumerate(spy.log):
            rate = first if number == 0 else 0.2
            weights = [8 / 29, 12 / 29, 9 / 29]
            fresh = average(exchange.outcomes, weights, f"{layer}.batch_mean")
            spread = sum(
                w * (o.update.shared[f"{layer}.batch_var"] + (o.update.shared[f"{layer}.batch_mean"] - fresh).square())
                for w, o in zip(weights, exchange.outcomes, strict=True)
            )
            mean, var = (1 - rate) * mean + rate * fresh, (1 - rate) * var + rate * spread
        assert close(run.server.tree[f"{layer}.running_mean"], mean)
        assert close(run.server.tree[f"{layer}.running_var"], var)
        assert float(run.server.tree[f"{layer}.batch_count"]) == 0


def test_fbn_with_one_step_is_centralized_sgd_with_held_statistics() -> None:
    made = tiny.plan("fbn", model=warmed_up(tiny.residual_net()), rounds=1, train__momentum=0.0, **WHOLE_BATCHES)
    trained = keys_of(made.prepared.entries, *TRAINED)
    centralized = centralized_sgd(made, hold=frozenset({Kind.STATISTIC}))
    assert distance(only(tiny.play(made).server.tree, trained), only(centralized, trained)) < EXACT


def test_the_factor_of_hbn_is_learned_and_never_leaves_its_client() -> None:
    made = tiny.plan("hbn", rounds=2)
    run, spy = spied(made)
    list(run.rounds())
    factors = keys_of(made.prepared.entries, Kind.EXTRA)
    assert factors
    assert all(not set(factors) & o.update.shared.keys() for e in spy.log for o in e.outcomes)
    trees = [only(run.store.get(client).tree, factors) for client in (0, 1, 2)]
    assert len({digest(tree) for tree in trees}) == 3
    assert all(bool(value.abs().max() > 0) for tree in trees for value in tree.values())
    assert all(float(run.server.tree[key].abs().max()) == 0 for key in factors)


def test_hbn_is_tested_with_the_moments_of_all_data() -> None:
    data = tiny.federation((8, 12, 4))
    made = tiny.plan("hbn(records=batch)", data=data, train__local_steps=None, train__local_epochs=1)
    server = tiny.play(made).server.tree
    name, mean, var = first_norm(made, server, made.federation.x)
    assert close(server[f"{name}.running_mean"], mean)
    assert close(server[f"{name}.running_var"], var)


@pytest.mark.parametrize(("options", "first"), [("", 0.002), ("ema=0.1", 0.1), ("ema=0.1,first=1.0", 1.0)])
def test_hbn_moves_the_shared_statistics_from_where_they_start_by_the_mixtures_it_saw(
    options: str, first: float
) -> None:
    """Each client's first look, at its factor 0, is half of the batch's moments and half of the initial (0, 1)."""
    made = tiny.plan(f"hbn({options})", rounds=2, eval__every=9)
    run, spy = spied(made)
    next(iter(run.rounds()))
    weights = [8 / 29, 12 / 29, 9 / 29]
    look, train = spy.log[:2]
    layer = "bn1"
    for job, outcome in zip(look.jobs, look.outcomes, strict=True):
        assert float(job.start[f"{layer}.factor"].abs().max()) == 0
        assert float(outcome.update.shared[f"{layer}.batch_var"].min()) > 0.5  # half of 1, and some of the batch's
    mean = average(look.outcomes, weights, f"{layer}.batch_mean")
    assert close(train.jobs[0].start[f"{layer}.running_mean"], first * mean)


@pytest.mark.parametrize("expression", ["fbn(ema=0.0)", "hbn(ema=0.0)"])
def test_rates_of_averages_are_checked(expression: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse(expression)
    assert str(refusal.value) == "ema=0.0 is no rate of an average; give a number above 0, up to 1"


def test_the_unsquared_penalty_is_another_one_with_no_pull_at_the_start() -> None:
    one, plain = (tiny.play(tiny.plan(m, train__local_steps=1)) for m in ("fedprox(mu=0.5,norm=l2)", "fedavg"))
    assert digest(one.server.tree) == digest(plain.server.tree)
    servers = [tiny.play(tiny.plan(m)).server.tree for m in ("fedprox(mu=0.5,norm=l2)", "fedprox(mu=0.5)", "fedavg")]
    assert len({digest(server) for server in servers}) == 3
    assert all(bool(value.isfinite().all()) for value in servers[0].values())


def test_clients_that_send_nothing_have_no_exchange() -> None:
    rows = list(Run(tiny.plan("standalone"), Store()).rounds())
    assert [(row["exchanges"], row["bytes_up"], row["bytes_down"]) for row in rows] == [(0, 0, 0)] * 4
