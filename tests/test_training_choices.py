"""Every task and every optimizer in every engine, over a wire, and after a restart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fednorm
import over_a_wire
import tiny
from fednorm.core.optim import Optimizer
from fednorm.core.optimizers import register_optimizer
from fednorm.core.state import Tree
from fednorm.data.federation import Federation
from fednorm.data.given import from_clients
from fednorm.errors import ConfigError, WireError
from fednorm.halves.messages import LocalWork
from fednorm.running.plan import make_plan
from fednorm.running.progress import headline
from fednorm.running.run import Run
from fednorm.running.store import Store
from fednorm.scoring.own_task import Task
from fednorm.scoring.tasks import make_task
from test_stacked import assert_same_clients, gap


def net(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, outputs)).double()


def inputs(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 5, generator=generator, dtype=torch.float64) + seed % 3


def data(kind: str, outputs: int, sizes: tuple[int, ...] = (8, 12, 9)) -> Federation:
    def examples(count: int, seed: int) -> tuple[Tensor, Tensor]:
        x = inputs(count, seed)
        raw = x[:, :outputs] * 2 - x[:, 1 : outputs + 1]
        if kind == "regression":
            return x, raw if outputs > 1 else raw[:, 0]
        return x, (raw > 0).long() if kind == "multilabel" else raw.argmax(1)

    train = [examples(size, client + 1) for client, size in enumerate(sizes)]
    test = [examples(6, client + 101) for client in range(len(sizes))]
    classes = 3 if kind == "classification" else None
    return from_clients(train, test, task=kind, num_classes=classes)


def distance(output: Tensor, y: Tensor) -> Tensor:
    return (output[:, 0] - y).abs()


def mean_distance(output: Tensor, y: Tensor) -> Tensor:
    return distance(output, y).mean()


OWN = Task(mean_distance, {"mae": distance}, higher_is_better=False, kind="regression", name="distances")
TASKS: dict[str, tuple[str, int, str | Task]] = {
    "classes": ("classification", 3, "classification(weights=balanced,smoothing=0.1)"),
    "labels": ("multilabel", 3, "multilabel"),
    "one number": ("regression", 1, "regression"),
    "two numbers": ("regression", 2, "regression(loss=huber)"),
    "own": ("regression", 1, OWN),
}


def made(name: str, engine: str = "sequential", method: str = "fedbn", **changes: Any) -> Any:
    kind, outputs, task = TASKS[name]
    named = task if isinstance(task, str) else None
    settings = tiny.config(method, **tiny.engine(engine), data__val_fraction=0.25, task=named, **changes)
    own = None if isinstance(task, str) else task
    return make_plan(settings, model=net(outputs), federation=data(kind, outputs), task=own)


@pytest.mark.parametrize("name", TASKS)
def test_tasks_in_stacks(name: str) -> None:
    reference, stacked = tiny.play(made(name)), tiny.play(made(name, "stacked"))
    assert gap(reference, stacked) < 1e-10
    assert_same_clients(reference, stacked)
    left, right = (list(run.store.rows())[-1]["eval"] for run in (reference, stacked))
    metric = reference.plan.task.metric
    for protocol in ("pooled", "own_client", "validation"):
        assert left[protocol][metric] == pytest.approx(right[protocol][metric], abs=1e-8)


@pytest.mark.parametrize("name", ["classes", "own"])
def test_tasks_in_programs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fednorm.engines.stack.slot.DEVICES", {"cpu"})
    reference, stayed = tiny.play(made(name)), tiny.play(made(name, "stacked"))
    assert gap(reference, stayed) < 1e-10
    assert_same_clients(reference, stayed)


@pytest.mark.slow
def test_a_task_and_an_optimizer_of_ones_own_in_processes() -> None:
    choices = {"train__optimizer": "test-plain"}
    left, right = (tiny.play(made("own", engine, **choices)) for engine in ("sequential", "workers"))
    assert not right.engine.fell_back
    assert tiny.fingerprint(left) == tiny.fingerprint(right)


@pytest.mark.parametrize("name", ["one number", "own"])
def test_scores_of_clients_have_every_metric_and_its_direction(name: str) -> None:
    run = tiny.play(made(name))
    row = list(run.store.rows())[-1]
    own = row["eval"]["own_client"]
    metric = run.plan.task.metric
    assert row["metric"] == {"name": metric, "higher_is_better": False, "percent": False}
    assert own["worst"] == max(own["per_client"].values())
    assert own[metric] == pytest.approx(sum(own["per_client"].values()) / 3)
    others = {"one number": {"mae", "r2", "loss"}, "own": {"loss"}}[name]
    assert set(own["per_client_metrics"]) == others
    assert own["loss"] == pytest.approx(sum(own["per_client_metrics"]["loss"].values()) / 3)


def test_the_best_round_has_the_lowest_error() -> None:
    result = fednorm.run(
        model=net(1), federation=data("regression", 1), rounds=6, lr=0.3, val_fraction=0.25, dtype="float64",
        task="regression", **{"eval.every": 1},
    )  # fmt: skip
    (only,) = result.runs
    curve = only["curves"]
    best = only["best_validation"]
    assert best is not None
    assert best["round"] == curve["validation"].index(min(curve["validation"])) + 1
    assert only["peak"]["pooled"]["round"] == curve["pooled"].index(min(curve["pooled"])) + 1
    assert (result.higher_is_better, result.percent) == (False, False)
    assert f"{only['final']['pooled']['rmse']:.4g}" in str(result)


def test_whole_numbers_can_be_predicted_as_measurements() -> None:
    numbers = tiny.plan("fedavg", model=net(1), data=data("classification", 3), task="regression")
    assert (numbers.federation.task, numbers.federation.num_classes) == ("regression", 1)
    assert numbers.federation.y.is_floating_point()


def test_models_by_name_get_as_many_outputs_as_there_are_targets() -> None:
    for name, outputs in (("labels", 3), ("two numbers", 2)):
        kind, _, task = TASKS[name]
        plan = make_plan(tiny.config(model="mlp_bn", task=task), federation=data(kind, outputs))
        assert list(plan.prepared.initial.values())[-1].shape == (outputs,)
    own = replace(OWN, outputs=4)
    plan = make_plan(tiny.config(model="mlp_bn"), federation=data("regression", 1), task=own)
    assert list(plan.prepared.initial.values())[-1].shape == (4,)


def test_balanced_weights_are_of_the_clients_that_train() -> None:
    known = replace(data("classification", 3), unseen=frozenset({2}))
    plan = tiny.plan("fedavg", model=net(3), data=known, task="classification(weights=balanced)")
    counts = torch.bincount(known.y[:20], minlength=3)
    assert plan.task == replace(
        make_task("classification(weights=balanced)", 3, counts=counts.tolist), name=plan.task.name
    )


@pytest.mark.parametrize("name", ["classes", "own"])
def test_a_run_with_a_task_goes_on_exactly(name: str) -> None:
    choices = {"train__optimizer": "adamw", "train__warmup": 2}
    whole = tiny.play(made(name, method="fedavg+local-momentum", **choices))
    store = Store()
    tiny.play(made(name, method="fedavg+local-momentum", **choices), store, rounds=2)
    goes_on = tiny.play(made(name, method="fedavg+local-momentum", **choices), store)
    assert tiny.fingerprint(goes_on) == tiny.fingerprint(whole)


def test_a_task_of_ones_own_is_asked_for_again(tmp_path: Path) -> None:
    given: dict[str, Any] = {"model": net(1), "federation": data("regression", 1), "rounds": 2, "dtype": "float64"}
    first = fednorm.run(task=OWN, out=tmp_path / "run", **given)
    again = fednorm.run(task=OWN, out=tmp_path / "run", resume=True, **given)
    assert first.runs[0]["digest"] == again.runs[0]["digest"]
    with pytest.raises(ConfigError, match="was started with another config"):
        fednorm.run(out=tmp_path / "run", resume=True, **given)


# -- optimizers --


def plainly(value: Tensor, grad: Tensor, buffers: Tree, numbers: Any) -> tuple[Tensor, Tree]:
    """SGD with momentum, as anybody would write it."""
    moved = numbers["momentum"] * buffers["velocity"] + grad + numbers["weight_decay"] * value
    return value - numbers["lr"] * moved, {"velocity": moved}


def shrunk(value: Tensor, grad: Tensor, buffers: Tree, numbers: Any) -> tuple[Tensor, Tree]:
    """A step as long as the learning rate says, for each tensor as a whole."""
    return value - numbers["lr"] * grad / (grad.norm() + 1e-3), buffers


@register_optimizer("test-plain")
def plain() -> Optimizer:
    return Optimizer(plainly, ("velocity",))


@register_optimizer("test-shrunk")
def whole_tensors() -> Optimizer:
    return Optimizer(shrunk, elementwise=False)


OPTIMIZERS = ("sgd(nesterov=true)", "adam(beta1=0.8,eps=1e-3)", "adamw(eps=1e-3)", "test-plain", "test-shrunk")
EQUAL: dict[str, Any] = {"data": tiny.federation((8, 8, 8)), "train__lr": 0.02}


@pytest.mark.parametrize("expression", OPTIMIZERS)
def test_optimizers_in_stacks(expression: str) -> None:
    changes = {**EQUAL, "train__optimizer": expression, "model": tiny.conv_net()}
    left, right = (tiny.play(tiny.plan("fedbn", engine__name=name, **changes)) for name in ("sequential", "stacked"))
    assert gap(left, right) < 1e-10


@pytest.mark.parametrize("expression", ["sgd(nesterov=true)", "test-plain", "test-shrunk"])
def test_optimizers_in_programs(expression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program joins tensors and has an operator for plain SGD; another optimizer must never end up in it."""
    monkeypatch.setattr("fednorm.engines.stack.slot.DEVICES", {"cpu"})
    changes = {**EQUAL, "train__optimizer": expression, "model": tiny.conv_net(), "rounds": 2}
    left, right = (tiny.play(tiny.plan("fedavg", engine__name=name, **changes)) for name in ("sequential", "stacked"))
    assert gap(left, right) < 1e-10


def test_momentum_written_by_oneself_is_the_built_in_one() -> None:
    built_in = tiny.play(tiny.plan("fedavg"))
    own = tiny.play(tiny.plan("fedavg", train__optimizer="test-plain"))
    assert gap(built_in, own) < 1e-12


@pytest.mark.parametrize("policy", ["local", "global"])
@pytest.mark.parametrize("expression", ["adamw", "test-plain"])
def test_any_buffers_can_be_maintained(expression: str, policy: str) -> None:
    run = tiny.play(tiny.plan(f"fedavg+{policy}-momentum", train__optimizer=expression))
    names = set(run.store.get(0).tree) if policy == "local" else set(run.server.tree)
    part = {"adamw": "exp_avg", "test-plain": "velocity"}[expression]
    assert any(name.startswith(f"{part}:") for name in names)


def test_an_optimizer_without_buffers_has_nothing_to_maintain() -> None:
    with pytest.raises(ConfigError) as refusal:
        tiny.plan("fedavg+local-momentum", train__optimizer="test-shrunk")
    assert str(refusal.value) == (
        "'local-momentum' finds no buffers to maintain, which optimizer 'test-shrunk' has not; "
        "give another optimizer, or --allow-noop to run it all the same"
    )


# -- over a wire --


@pytest.mark.parametrize("name", ["classes", "one number"])
def test_sites_do_what_the_simulator_does(name: str, tmp_path: Path) -> None:
    plan = made(name, train__optimizer="adamw(beta2=0.9)", train__warmup=2)
    wired = over_a_wire.play(plan, net(TASKS[name][1]), tmp_path)
    assert wired.fingerprint == over_a_wire.fingerprint_of(tiny.play(plan))


def welcome(**options: Any) -> Any:
    """What the first of two clients is told."""
    hellos = [fednorm.Site.hello(name, net(1), 8) for name in ("a", "b")]
    return fednorm.found(hellos, net(1), "fedavg", LocalWork(dtype="float64"), run="r", **options)[1]["a"]


def site(terms: Any, task: str) -> fednorm.Site:
    own = inputs(8, 1), torch.zeros(8)
    return fednorm.Site(terms, 0, net(1), own, task=make_task(task, 1))


def test_a_site_that_does_not_know_the_optimizer_says_so() -> None:
    terms = welcome().terms
    with pytest.raises(ConfigError) as refusal:
        site(replace(terms, work=replace(terms.work, optimizer="nobodys")), "regression")
    assert str(refusal.value).startswith("optimizer 'nobodys' is not known; known: adam, adamw, ")


def test_a_site_with_another_task_is_refused() -> None:
    assert site(welcome().terms, "regression").client == 0
    assert site(welcome(task="regression").terms, "regression").client == 0
    with pytest.raises(WireError) as refusal:
        site(welcome(task="regression(loss=l1)").terms, "regression")
    assert str(refusal.value) == (
        "the server's task is 'regression(loss=l1)', this site's 'regression'; give both the same"
    )


def test_a_run_is_told_with_its_unit() -> None:
    run: Run = tiny.play(made("one number"))
    row = list(run.store.rows())[-1]
    assert headline(row) == f"rmse {row['eval']['pooled']['rmse']:.4g}"
