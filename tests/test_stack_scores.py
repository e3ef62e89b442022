"""Clients' own models, tested as a stack: each client's scores are those of its model alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fednorm
import tiny
from fednorm.data.federation import Federation
from fednorm.data.given import from_clients
from fednorm.engines.stack.scores import StackScorer
from fednorm.running.clock_run import ClockRun, run_of
from fednorm.running.evaluate import Scores, evaluate
from fednorm.running.plan import Plan
from fednorm.running.run import Run
from fednorm.running.store import Store

SIZES = (6, 1, 9, 6, 7, 30, 2)
"""Test rows of the clients: equal and unequal ones, more than fit into a stack, and a single one."""
ROOM = 24


def federation(sizes: Sequence[int] = SIZES) -> Federation:
    train = [tiny.examples(8, shift=client / 2 - 1, seed=client + 1) for client in range(len(sizes))]
    test = [tiny.examples(size, shift=client / 2 - 1, seed=client + 101) for client, size in enumerate(sizes)]
    return from_clients(train, test, num_classes=tiny.NUM_CLASSES)


def played(method: str = "fedbn", **changes: Any) -> Run:
    data = changes.pop("data", None) or federation()
    return tiny.play(tiny.plan(method, data=data, rounds=2, eval__chunk=ROOM, **changes))


def both(run: Run, plan: Plan | None = None) -> tuple[Scores, Scores, StackScorer, list[int]]:
    """Scores one by one and stacked, what stacked them, and the models of each call."""
    plan = plan or run.plan
    state = plan, plan.evaluated(-1), run.server.tree, run.store
    stack = StackScorer(plan)
    calls: list[int] = []
    stack._model.register_forward_hook(lambda _, given, __: calls.append(len(given[0])))
    return evaluate(*state), evaluate(*state, stack=stack), stack, calls


def assert_same(alone: Any, stacked: Any, path: str = "") -> None:
    """Equal, but for losses, which add up in another order."""
    if isinstance(alone, dict):
        assert alone.keys() == stacked.keys()
        for key in alone:
            assert_same(alone[key], stacked[key], f"{path}.{key}")
    elif "loss" in path or "mae" in path:
        assert stacked == pytest.approx(alone, rel=0, abs=1e-10), path
    else:
        assert stacked == alone, path


@pytest.mark.parametrize("method", ["fedbn", "silobn", "fedbn+local-momentum"])
@pytest.mark.parametrize("held", [0.0, 0.25], ids=["tests", "tests and validation"])
def test_clients_of_a_stack_have_the_scores_they_have_alone(method: str, held: float) -> None:
    run = played(method, data__val_fraction=held)
    alone, stacked, _, calls = both(run)
    assert set(stacked) == {"pooled", "own_client"} | ({"validation"} if held else set())
    assert_same(alone, stacked)
    # A trial of two calls; then 9 with 7 and 6 with 6 rows, while the smallest and the largest client go alone.
    assert len(calls) == 2 + 2 + bool(held)


@pytest.mark.parametrize("method", ["fedbn", "fedbuff(b=3)+fedbn"])
def test_a_run_of_the_stacked_engine_scores_by_stacks(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    def ended(engine: str) -> Run | ClockRun:
        made = tiny.plan(method, data=federation(), rounds=2, eval__chunk=ROOM, engine__name=engine)
        run = run_of(made, Store())
        assert len(list(run.rounds())) == 2
        return run

    reference, run = ended("sequential"), ended("stacked")
    assert "_scorer_of_stacks" in vars(run)
    assert "_scorer_of_stacks" not in vars(reference)
    rows = zip(reference.store.rows(), run.store.rows(), strict=True)
    for wanted, found in rows:
        if "eval" in wanted:
            assert found["eval"]["own_client"]["per_client"] == wanted["eval"]["own_client"]["per_client"]
    assert "one by one" not in capsys.readouterr().err


def test_newcomers_that_have_statistics_of_their_own_data_are_stacked_too() -> None:
    data = replace(federation(), unseen=frozenset({0, 3, 4}))
    alone, stacked, _, calls = both(played("adabn", data=data))
    assert_same(alone, stacked)
    assert calls


class CountsExactly:
    """A metric of a user's own that is no mean over examples."""

    def sums(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"right": (output.argmax(1) == y).sum(), "of": torch.tensor(len(y))}

    def value(self, sums: Any) -> float:
        return float(sums["right"] / sums["of"])


def test_a_task_of_a_users_own_sees_each_clients_rows_and_no_others() -> None:
    """Its loss is no mean of losses of single examples, so that filled up or foreign rows would show."""

    def loss(output: Tensor, y: Tensor) -> Tensor:
        assert isinstance(float(output.sum()), float)  # it looks at values, as no mapping allows
        return nn.functional.cross_entropy(output, y) + output.var(0, correction=0).sum()

    def mae(output: Tensor, y: Tensor) -> Tensor:
        return (output.argmax(1) - y).abs().double()

    run = played()
    plan = replace(run.plan, task=fednorm.Task(loss, {"right": CountsExactly(), "mae": mae}))
    alone, stacked, _, calls = both(run, plan)
    assert calls
    assert_same(alone, stacked)


class AmongOthers(nn.Module):
    """An example's output depends on the others of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny.conv_net()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x - x.mean(0))


def test_examples_that_see_each_other_are_tested_with_those_they_would_see_alone() -> None:
    alone, stacked, stack, calls = both(played(model=AmongOthers().double()))
    assert stack._alone is False
    assert_same(alone, stacked)
    assert len(calls) == 2 + 1  # the trial, and the two clients with as many rows


class Noisy(nn.Module):
    """It draws in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny.conv_net()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 0 * nn.functional.dropout(x.flatten(1)[:, :1], 0.5, training=True)


class Twice(nn.Module):
    """Two outputs in one, of which a task of the user's own takes the first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny.conv_net()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x)
        return y, y


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (tiny.Choosy, "vmap"),
        (Noisy, "it draws random numbers in evaluation"),
        (Twice, "the output is no tensor with a row for each example"),
    ],
)
def test_models_that_cannot_be_stacked_are_tested_one_by_one(
    model: type[nn.Module], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = fednorm.Task(lambda output, y: nn.functional.cross_entropy(output[0], y))
    own = {"task": first} if model is Twice else {}
    made = fednorm.running.plan.make_plan(
        tiny.config("fedbn", rounds=2, eval__chunk=ROOM, engine__name="sequential"),
        model=model().double(),
        federation=federation(),
        **own,
    )
    alone, stacked, stack, _ = both(tiny.play(made))
    assert stacked == alone
    told = capsys.readouterr().err.splitlines()
    assert [line.startswith("stacked engine: models are tested one by one (") for line in told] == [True]
    assert why in told[0]
    assert stack._failed
