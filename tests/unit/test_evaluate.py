"""Which model is scored on which data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import tiny
from fednorm.core.state import Kind, Tree
from fednorm.halves.mine import ClientState
from fednorm.running.cohorts import cohort_of
from fednorm.running.evaluate import averaged, evaluate
from fednorm.running.plan import Plan
from fednorm.running.run import Run
from fednorm.running.trained import model_of
from fednorm.scoring.scores import MOST_NUMBERS


def accuracy(plan: Plan, state: Tree, rows: Tensor | None = None, training: bool = False) -> float:
    """By hand: the share of rows the model gets right, in percent."""
    data = plan.federation
    pool = (data.x, data.y) if training else (data.test_x, data.test_y)
    rows = torch.arange(len(pool[1])) if rows is None else rows
    own = {key: state[key] for key in plan.prepared.facts.entries}
    with torch.no_grad():
        output = functional_call(plan.prepared.model.eval(), own, (pool[0][rows],))
    return 100 * int((output.argmax(1) == pool[1][rows]).sum()) / len(rows)


def scores(run: Run) -> dict[str, Any]:
    return evaluate(run.plan, run.plan.evaluated(-1), run.server.tree, run.store)


@pytest.fixture(scope="module")
def fedbn() -> Run:
    return tiny.play(tiny.plan("fedbn", data__val_fraction=0.25))


def own_model(run: Run, client: int) -> Tree:
    return {**run.server.tree, **run.store.get(client).tree}


def averaged_model(run: Run) -> Tree:
    states = [run.store.get(client).tree for client in run.store.seen()]
    mean = {key: torch.stack([s[key].double() for s in states]).mean(0) for key in states[0]}
    return {**run.server.tree, **mean}


def test_the_global_model_is_scored_on_the_whole_test_set() -> None:
    run = tiny.play(tiny.plan("fedavg"))
    pooled = scores(run)["pooled"]
    assert pooled["accuracy"] == accuracy(run.plan, run.server.tree)
    assert pooled["how"] == "global model"
    assert len(pooled["per_class"]) == tiny.NUM_CLASSES


@pytest.mark.parametrize("most", [MOST_NUMBERS, 1], ids=["outputs kept", "outputs too large to keep"])
def test_groups_of_rows_are_scored_as_each_alone(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that share rows, hold some twice, or leave some out; chunks that end inside them."""
    monkeypatch.setattr("fednorm.scoring.scores.MOST_NUMBERS", most)
    run = tiny.play(tiny.plan("fedavg", eval__chunk=5))
    pool = run.plan.federation.test_x, run.plan.federation.test_y
    groups = [torch.tensor(rows) for rows in ([0, 1, 2, 7, 8, 9, 10], [2, 2, 11], [9, 0])]
    for found, group in zip(run.plan.scorer.groups(run.server.tree, pool, groups), groups, strict=True):
        alone = run.plan.scorer.rows(run.server.tree, pool, group)
        assert found.keys() == alone.keys()
        assert all(torch.allclose(found[name], alone[name]) for name in alone)
        assert int(found["count"].sum()) == len(group)


def test_a_global_model_sees_a_row_once_however_many_clients_hold_it() -> None:
    run = tiny.play(tiny.plan("fedavg"))
    rows = torch.arange(len(run.plan.federation.test_y))
    shared = replace(run.plan, federation=replace(run.plan.federation, own_test=(rows,) * 3))
    seen: list[int] = []
    hook = run.plan.prepared.model.register_forward_hook(lambda module, given, out: seen.append(len(out)))
    found = evaluate(shared, run.plan.evaluated(-1), run.server.tree, run.store)
    hook.remove()
    assert sum(seen) == 2 * len(rows)  # for the pooled score, and for all clients together
    assert set(found["own_client"]["per_client"].values()) == {found["pooled"]["accuracy"]}


def test_local_batch_norms_are_averaged_for_the_pooled_score_which_says_so(fedbn: Run) -> None:
    pooled = scores(fedbn)["pooled"]
    assert pooled["accuracy"] == accuracy(fedbn.plan, averaged_model(fedbn))
    assert pooled["how"] == "averaged local state"


def test_each_client_is_scored_with_its_own_model_on_its_own_rows(fedbn: Run) -> None:
    own = scores(fedbn)["own_client"]
    tests = fedbn.plan.federation.own_test
    by_hand = {c: accuracy(fedbn.plan, own_model(fedbn, c), tests[c]) for c in range(3)}
    assert own["per_client"] == by_hand
    assert own["accuracy"] == sum(by_hand.values()) / 3
    assert own["worst"] == min(by_hand.values())


def test_validation_uses_rows_set_aside_from_training(fedbn: Run) -> None:
    held = [fedbn.plan.batches.split(c)[1] for c in range(3)]
    by_hand = {c: accuracy(fedbn.plan, own_model(fedbn, c), held[c], training=True) for c in range(3)}
    assert scores(fedbn)["validation"]["per_client"] == by_hand
    assert "validation" not in scores(tiny.play(tiny.plan("fedavg", rounds=1)))


def test_a_newcomer_gets_the_average() -> None:
    data = replace(tiny.federation((8, 12, 9, 7)), unseen=frozenset({3}))
    run = tiny.play(tiny.plan("fedbn", data=data))
    assert run.store.seen() == [0, 1, 2]
    found = scores(run)
    assert found["unseen"]["per_client"] == {3: accuracy(run.plan, averaged_model(run), data.own_test[3])}
    assert set(found["own_client"]["per_client"]) == {0, 1, 2}


def test_models_that_share_no_weight_are_scored_one_by_one() -> None:
    run = tiny.play(tiny.plan("standalone"))
    pooled = scores(run)["pooled"]
    by_hand = {c: accuracy(run.plan, own_model(run, c)) for c in range(3)}
    assert pooled["per_client"] == by_hand
    assert pooled["how"] == "mean over the clients' own models"


def test_domains_are_averaged_without_weights() -> None:
    domains = {"small": torch.tensor([0, 1]), "large": torch.arange(2, 18)}
    run = tiny.play(tiny.plan("fedavg", data=replace(tiny.federation(), domains=domains)))
    found = scores(run)["domains"]
    by_hand = {name: accuracy(run.plan, run.server.tree, rows) for name, rows in domains.items()}
    assert found["per_domain"] == by_hand
    assert found["accuracy"] == sum(by_hand.values()) / 2


@pytest.mark.parametrize("chunk", [1, 5, 500])
def test_the_chunk_does_not_matter(chunk: int) -> None:
    run = tiny.play(tiny.plan("fedavg", rounds=1, eval__chunk=chunk))
    found = scores(run)["pooled"]
    assert found["accuracy"] == accuracy(run.plan, run.server.tree)


def test_counters_average_by_maximum_and_clients_without_state_do_not_count(fedbn: Run) -> None:
    run = tiny.play(tiny.plan("fedbn", rounds=1))
    run.store.put(7, ClientState(0, {}))
    average = averaged(run.plan, run.plan.phases[0], run.store)
    counters = [k for k, e in run.plan.prepared.facts.entries.items() if e.kind is Kind.COUNTER]
    assert {average[key].dtype for key in counters} == {torch.int64}
    assert all(int(average[key]) == 2 for key in counters)


def test_evaluation_changes_nothing() -> None:
    often = tiny.fingerprint(tiny.play(tiny.plan("fedbn", eval__every=1)))
    seldom = tiny.fingerprint(tiny.play(tiny.plan("fedbn", eval__every=4)))
    assert (often["server"], often["clients"]) == (seldom["server"], seldom["clients"])


def test_the_training_loss_of_a_round_is_also_told_with_clients_by_size() -> None:
    run = tiny.play(tiny.plan("fedavg", rounds=1))
    losses = [report.losses["all"] for report in run.server.reports]
    row = next(iter(run.store.rows()))
    assert row["train_loss"] == sum(losses) / 3
    assert row["train_loss_weighted"] == (8 * losses[0] + 12 * losses[1] + 9 * losses[2]) / 29


def test_local_state_may_be_averaged_over_the_last_cohort_alone() -> None:
    chosen = {"clients_per_round": 2, "eval__average": "last_cohort", "eval__every": 1, "rounds": 6}
    run = tiny.play(tiny.plan("fedbn", **chosen))
    rows = list(run.store.rows())
    last = rows[-1]["cohort"]
    assert len(last) == 2
    states = [run.store.get(client).tree for client in last]
    mean = {key: torch.stack([state[key].double() for state in states]).mean(0) for key in states[0]}
    pooled = rows[-1]["eval"]["pooled"]
    assert pooled["accuracy"] == accuracy(run.plan, {**run.server.tree, **mean})
    assert pooled["how"] == "averaged local state of the last cohort"
    everybody = tiny.play(tiny.plan("fedbn", **{**chosen, "eval__average": "all"}))
    assert tiny.fingerprint(everybody)["server"] == tiny.fingerprint(run)["server"]
    assert averaged(run.plan, run.plan.phases[0], run.store).keys() == mean.keys()
    tree = model_of(run.plan, run.store)
    assert all(torch.equal(tree[key], mean[key].to(tree[key].dtype)) for key in mean if mean[key].dim())
    stacked = tiny.play(tiny.plan("fedbn", **chosen, engine__name="stacked"))
    pooled_of = [[row["eval"]["pooled"]["accuracy"] for row in each] for each in (rows, stacked.store.rows())]
    assert pooled_of[0] == pooled_of[1]


def test_who_was_in_a_round_can_be_asked_afterwards() -> None:
    run = tiny.play(tiny.plan("fedavg", clients_per_round=2, world__dropout=0.4, rounds=8))
    assert [cohort_of(run.plan, row["round"]) for row in run.store.rows()] == [
        row.get("cohort", [0, 1, 2]) for row in run.store.rows()
    ]
    assert any("dropped" in row for row in run.store.rows())
    assert [len(cohort_of(tiny.plan("fedavg"), number)) for number in (1, 2)] == [3, 3]


def test_before_anybody_keeps_state_the_mean_is_over_all() -> None:
    run = tiny.play(tiny.plan("fedbn", rounds=1))
    phase = run.plan.phases[0]
    everybody, nobody = averaged(run.plan, phase, run.store), averaged(run.plan, phase, run.store, {7})
    assert all(torch.equal(everybody[key], nobody[key]) for key in everybody)
