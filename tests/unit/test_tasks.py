"""Losses and scores of every task, worked out by hand, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import fednorm
from fednorm.core.task import AnyTask, Sums
from fednorm.errors import ConfigError
from fednorm.scoring.class_weights import CrossEntropy
from fednorm.scoring.classification import Classification, Segmentation
from fednorm.scoring.own_task import Task
from fednorm.scoring.tasks import TaskData, make_task, register_task


def added(task: AnyTask, output: Tensor, y: Tensor, at: int) -> Sums:
    """The sums of two parts of a batch, added."""
    first, second = (task.score(output[part], y[part]) for part in (slice(at), slice(at, None)))
    return {name: first[name] + second[name] for name in first}


LOGITS = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0], [0.0, 0.5]]).double()
LABELS = torch.tensor([0, 1, 1, 0])


def test_class_weights_and_smoothing_are_torchs() -> None:
    task = make_task("classification(weights=0.2/0.8,smoothing=0.1)", 2)
    expected = functional.cross_entropy(LOGITS, LABELS, weight=torch.tensor([0.2, 0.8]).double(), label_smoothing=0.1)
    assert torch.equal(task.loss(LOGITS, LABELS), expected)


@pytest.mark.parametrize("weights", ["equal", "0.2/0.8"])
def test_the_reported_loss_is_the_one_that_is_trained_on_however_batches_are_cut(weights: str) -> None:
    task = make_task(f"classification(weights={weights})", 2)
    for at in (1, 3):
        found = task.summary(added(task, LOGITS, LABELS, at))
        assert found["loss"] == pytest.approx(float(task.loss(LOGITS, LABELS)), abs=1e-15)
        assert found["accuracy"] == 50
        assert found["per_class"] == [50, 50]


def test_balanced_weights_make_classes_weigh_the_same() -> None:
    task = make_task("classification(weights=balanced)", 3, counts=lambda: [6, 2, 0])
    assert isinstance(task, Classification)
    assert task.entropy.weights == (8 / 18, 8 / 6, 0.0)
    assert task.name == "classification(weights=balanced)"


def test_weights_do_not_count_pixels_that_are_ignored() -> None:
    task = make_task("segmentation(weights=1/3)", 2, 9)
    output, y = torch.zeros(1, 2, 1, 3).double(), torch.tensor([[[0, 1, 9]]], dtype=torch.uint8)
    assert isinstance(task, Segmentation)
    assert float(task.score(output, y)["weight"]) == 4
    assert task.summary(task.score(output, y))["loss"] == pytest.approx(math.log(2))
    assert float(task.loss(output, y)) == pytest.approx(math.log(2))


def test_a_loss_is_told_by_its_settings_alone() -> None:
    assert repr(CrossEntropy((0.5, 2.0))) == "CrossEntropy(weights=(0.5, 2.0), smoothing=0.0, device='cpu')"


def test_classification_by_hand() -> None:
    """Labels 0 0 0 2 2, answers 0 0 1 2 0: two of three, none of none, one of two."""
    output = torch.eye(4).double()[torch.tensor([0, 0, 1, 2, 0])] * 100
    sums = added(make_task("classification", 4), output, torch.tensor([0, 0, 0, 2, 2]), 2)
    found = make_task("classification", 4).summary(sums)
    assert found["accuracy"] == pytest.approx(60.0)
    assert found["per_class"] == [pytest.approx(200 / 3), None, 50.0, None]
    assert found["loss"] == pytest.approx(2 * 100 / 5)


def test_segmentation_by_hand() -> None:
    """Labels 0 0 1 1 and one ignored, answers 0 1 1 1 0: one of two, two of three, a class that nobody has or says."""
    output = torch.eye(3).double()[torch.tensor([[0, 1, 1, 1, 0]])].movedim(-1, 1) * 100
    sums = Segmentation(3).score(output, torch.tensor([[0, 0, 1, 1, 255]]))
    found = Segmentation(3).summary(sums)
    assert found["per_class"] == [pytest.approx(50.0), pytest.approx(200 / 3), None]
    assert found["miou"] == pytest.approx((50 + 200 / 3) / 2)
    assert found["pixel_accuracy"] == pytest.approx(75.0)
    assert found["loss"] == pytest.approx(100 / 4)


def test_tasks_are_equal_if_they_do_the_same() -> None:
    made = [make_task("classification(weights=0.2/0.8)", 2) for _ in range(2)]
    assert made[0] == made[1] != make_task("classification(weights=0.3/0.7)", 2)
    assert CrossEntropy((1.0, 2.0)) == CrossEntropy((1.0, 2.0))


def test_several_labels_at_once() -> None:
    """Of three labels the first is hit once of one, the second predicted once and never there, the third nowhere."""
    task = make_task("multilabel", 3)
    output = torch.tensor([[4.0, 4.0, -4.0], [-4.0, -4.0, -4.0]]).double()
    y = torch.tensor([[1, 0, 0], [0, 0, 0]])
    found = task.summary(added(task, output, y, 1))
    assert found["per_class"] == [100, 0, None]
    assert found["f1"] == 50
    assert found["f1_micro"] == pytest.approx(200 / 3)
    assert found["exact_match"] == 50
    assert found["loss"] == pytest.approx(float(functional.binary_cross_entropy_with_logits(output, y.double())))
    assert (task.metric, task.percent, task.higher_is_better) == ("f1", True, True)
    nothing = task.summary(task.score(output[1:], y[1:]))
    assert (nothing["f1"], nothing["f1_micro"], nothing["exact_match"]) == (100, 100, 100)


def test_a_threshold_of_ones_own() -> None:
    task = make_task("multilabel(threshold=0.99)", 1)
    found = task.summary(task.score(torch.tensor([[4.0], [9.0]]), torch.tensor([[1], [1]])))
    assert found["f1"] == pytest.approx(200 / 3)


def test_regression_by_hand() -> None:
    task = make_task("regression", 1)
    output, y = torch.tensor([[1.0], [2.0], [6.0]]).double(), torch.tensor([2.0, 2.0, 5.0])
    found = task.summary(added(task, output, y, 2))
    assert found["rmse"] == pytest.approx(math.sqrt(2 / 3))
    assert found["mae"] == pytest.approx(2 / 3)
    assert found["r2"] == pytest.approx(1 - (2 / 3) / 2)
    assert found["loss"] == pytest.approx(2 / 3)
    assert "per_target" not in found
    assert (task.metric, task.percent, task.higher_is_better) == ("rmse", False, False)
    assert torch.equal(task.loss(output, y), task.loss(output[:, 0], y))


def test_regression_of_several_targets() -> None:
    task = make_task("regression(loss=l1)", 2)
    output, y = torch.tensor([[1.0, 0.0], [2.0, 4.0]]), torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    found = task.summary(task.score(output, y))
    assert found["per_target"] == pytest.approx([math.sqrt(2.5), math.sqrt(5)])
    assert found["loss"] == found["mae"] == pytest.approx(7 / 4)
    assert found["r2"] is None  # targets that do not vary


@pytest.mark.parametrize("name", ["mse", "l1", "huber"])
def test_losses_of_regression_are_torchs(name: str) -> None:
    output, y = torch.tensor([0.5, 4.0]), torch.tensor([0.0, 0.0])
    torchs = {"mse": functional.mse_loss, "l1": functional.l1_loss, "huber": functional.huber_loss}[name]
    assert torch.equal(make_task(f"regression(loss={name})", 1).loss(output, y), torchs(output, y))


@pytest.mark.parametrize(
    ("task", "output", "y", "message"),
    [
        (
            "regression",
            (20, 3),
            (20,),
            "task 'regression': the model's output has shape (20, 3) for targets of shape (20,); "
            "give a model with 1 outputs",
        ),
        (
            "regression(loss=l1)",
            (20,),
            (20, 1),
            "task 'regression(loss=l1)': the model's output has shape (20,) for targets of shape (20, 1); "
            "give a model with 1 outputs",
        ),
        (
            "multilabel",
            (4, 1),
            (4, 3),
            "task 'multilabel': the model's output has shape (4, 1) for targets of shape (4, 3); "
            "give a model with 3 outputs",
        ),
    ],
)
def test_outputs_are_never_broadcast_to_targets(task: str, output: Any, y: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        make_task(task, 3).loss(torch.zeros(output), torch.zeros(y))
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("clasification", "task 'clasification' is not known; did you mean 'classification'?"),
        (
            "classification(smoothing=1)",
            "task 'classification(smoothing=1)': smoothing=1.0 is out of range; give 0 up to below 1",
        ),
        (
            "classification(smoothing=-0.1)",
            "task 'classification(smoothing=-0.1)': smoothing=-0.1 is out of range; give 0 up to below 1",
        ),
        (
            "classification(weights=1/2)",
            "task 'classification(weights=1/2)': weights=1/2 has 2 numbers for 3 classes; "
            "give one for each, or balanced",
        ),
        (
            "classification(weights=1/2/x)",
            "task 'classification(weights=1/2/x)': weights=1/2/x cannot be read; "
            "give balanced, equal, or numbers such as 0.2/0.8",
        ),
        (
            "classification(weights=1/nan/1)",
            "task 'classification(weights=1/nan/1)': weights=1/nan/1 is out of range; "
            "give numbers of 0 or more, one of them above 0",
        ),
        (
            "classification(weights=0/0/0)",
            "task 'classification(weights=0/0/0)': weights=0/0/0 is out of range; "
            "give numbers of 0 or more, one of them above 0",
        ),
        (
            "classification(weights=balanced)",
            "task 'classification(weights=balanced)': weights=balanced needs to know how many examples of each class "
            "all clients have; give numbers: weights=0.2/0.8",
        ),
        (
            "classification(weight=balanced)",
            "task 'classification(weight=balanced)': option of 'classification' 'weight' is not known; "
            "did you mean 'weights'?",
        ),
        (
            "classification(data=1)",
            "task 'classification(data=1)': option of 'classification' 'data' is not known; known: smoothing, weights.",
        ),
        ("regression(loss=mae)", "task 'regression(loss=mae)': loss 'mae' is not known; did you mean 'mse'?"),
        (
            "multilabel(threshold=1)",
            "task 'multilabel(threshold=1)': threshold=1.0 is out of range; give a probability between 0 and 1",
        ),
        ("a+b", "task 'a+b' names more than one; expected something like classification("),
    ],
)
def test_what_cannot_be_is_refused(expression: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        make_task(expression, 3)
    assert str(refusal.value).startswith(message)


def squared(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).square().mean()


def distance(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).abs()


class Largest:
    """The share of examples whose error is above 1, by sums of one's own."""

    def sums(self, output: Tensor, y: Tensor) -> Mapping[str, Tensor]:
        return {"far": ((output - y).abs() > 1).sum(), "all": torch.tensor(len(y))}

    def value(self, sums: Mapping[str, Tensor]) -> float:
        return float(sums["far"] / sums["all"])


def test_a_task_of_ones_own() -> None:
    task = Task(squared, {"mae": distance, "far": Largest()}, higher_is_better=False)
    output, y = torch.tensor([1.0, 2.0, 7.0]), torch.tensor([1.0, 4.0, 4.0])
    found = task.summary(added(task, output, y, 1))
    assert found == {"mae": pytest.approx(5 / 3), "far": pytest.approx(2 / 3), "loss": pytest.approx(13 / 3)}
    assert (task.metric, task.higher_is_better, task.percent) == ("mae", False, False)
    assert Task(squared, {"mae": distance, "far": Largest()}, headline="far").metric == "far"
    assert task == Task(squared, {"mae": distance, "far": task.metrics["far"]}, higher_is_better=False)


def test_without_metrics_the_loss_is_the_headline() -> None:
    task = Task(squared)
    assert (task.metric, task.higher_is_better) == ("loss", False)
    assert task.summary(task.score(torch.ones(2), torch.zeros(2))) == {"loss": 1.0}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Task(lambda output, y: (output - y).square()).loss(torch.ones(2), torch.zeros(2)),
            "task 'own': its loss returned a tensor of shape (2,), expected one number as a tensor; "
            "return the mean over the batch",
        ),
        (
            lambda: Task(lambda output, y: 1.0).loss(torch.ones(2), torch.zeros(2)),  # type: ignore[arg-type]
            "task 'own': its loss returned float, expected one number as a tensor; return the mean over the batch",
        ),
        (
            lambda: Task(squared, {"mae": squared}).score(torch.ones(2), torch.zeros(2)),
            "task 'own': metric 'mae' returned a tensor of shape () for 2 examples; "
            "return one value for each, of shape (2,)",
        ),
        (
            lambda: Task(squared, {"mae": distance}, headline="rmse"),
            "headline of task 'own' 'rmse' is not known; did you mean 'mae'?",
        ),
        (
            lambda: Task(squared, {"loss": distance}),
            "task 'own': a metric cannot be called 'loss'; choose another name",
        ),
    ],
)
def test_mistakes_in_a_task_of_ones_own_are_named(make: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        make()
    assert str(refusal.value) == message


def test_tasks_are_registered_by_name() -> None:
    @register_task("test-quantile")
    def quantile(data: TaskData, q: float = 0.5) -> Task:
        def loss(output: Tensor, y: Tensor) -> Tensor:
            error = y - output[:, 0]
            return torch.maximum(q * error, (q - 1) * error).mean()

        return Task(loss, kind="regression", outputs=data.outputs)

    task = make_task("test-quantile(q=0.9)", 1)
    assert task.name == "test-quantile(q=0.9)"
    assert float(task.loss(torch.zeros(1, 1), torch.ones(1))) == pytest.approx(0.9)
    with pytest.raises(ConfigError, match="option of 'test-quantile' 'p' is not known; known: q"):
        make_task("test-quantile(p=0.9)", 1)
    with pytest.raises(ConfigError, match="'test-quantile\\(q=word\\)': 'word' does not fit; q takes a number"):
        make_task("test-quantile(q=word)", 1)
    with pytest.raises(ConfigError, match="task 'classification' is registered already; choose another name"):
        register_task("classification")(quantile)
    with pytest.raises(ConfigError, match="task name 'a b' is not usable; expected letters, digits, '-' and '_'"):
        register_task("a b")
    register_task("test-quantile")(quantile)  # a file that is read again


def test_a_factory_must_return_a_task_and_be_given_what_it_needs() -> None:
    @register_task("test-none")
    def none() -> Task:
        return None  # type: ignore[return-value]

    @register_task("test-needy")
    def needy(q: float) -> Task:
        return Task(squared)

    with pytest.raises(ConfigError) as refusal:
        make_task("test-none", 1)
    assert str(refusal.value) == "task 'test-none' must return a fednorm.Task; it returned NoneType"
    with pytest.raises(ConfigError) as refusal:
        make_task("test-needy", 1)
    assert str(refusal.value) == "task 'test-needy' needs a value; write test-needy(q=...)"
    assert fednorm.Task is Task
