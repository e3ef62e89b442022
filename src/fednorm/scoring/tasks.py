"""What the outputs of a model mean, by name: the only place that knows one kind of problem from another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, cast

import torch

from fednorm.core.factories import Factories
from fednorm.core.task import AnyTask
from fednorm.errors import ConfigError, unknown
from fednorm.scoring.class_weights import CrossEntropy, check_smoothing, read_weights
from fednorm.scoring.classification import Classification, Segmentation
from fednorm.scoring.multilabel import MultiLabel
from fednorm.scoring.regression import LOSSES, Regression

EXAMPLE = "classification(weights=balanced,smoothing=0.1)"


@dataclass(frozen=True)
class TaskData:
    """What is known of the data where a task is made."""

    outputs: int
    """classes, labels or targets"""
    ignore_index: int = -100
    counts: Callable[[], Sequence[int]] | None = None
    """how many training examples, or pixels, of each class all clients have together, where that is known"""
    device: str = "cpu"


TASKS = Factories[AnyTask]("task", EXAMPLE, given=TaskData, returns=cast(Any, AnyTask), called="fednorm.Task")
register_task = TASKS.register
"""Make a function that returns a `Task` available under a name; its keyword arguments are the options.

A parameter of type `TaskData` is told what is known of the data.
"""


@register_task("classification")
def _classification(data: TaskData, weights: str = "equal", smoothing: float = 0.0) -> AnyTask:
    return Classification(data.outputs, _entropy(data, weights, smoothing))


@register_task("segmentation")
def _segmentation(data: TaskData, weights: str = "equal", smoothing: float = 0.0) -> AnyTask:
    return Segmentation(data.outputs, data.ignore_index, _entropy(data, weights, smoothing))


@register_task("multilabel")
def _multilabel(data: TaskData, threshold: float = 0.5) -> AnyTask:
    if not 0 < threshold < 1:
        raise ConfigError(f"threshold={threshold} is out of range; give a probability between 0 and 1")
    return MultiLabel(data.outputs, threshold)


@register_task("regression")
def _regression(loss: str = "mse") -> AnyTask:
    if loss not in LOSSES:
        raise unknown("loss", loss, LOSSES)
    return Regression(loss)


def _entropy(data: TaskData, weights: str, smoothing: float) -> CrossEntropy:
    counts = data.counts() if data.counts and weights == "balanced" else None
    return CrossEntropy(read_weights(weights, counts, data.outputs), check_smoothing(smoothing), data.device)


def make_task(
    expression: str,
    num_classes: int,
    ignore_index: int = 255,
    *,
    counts: Callable[[], Sequence[int]] | None = None,
    device: torch.device | str = "cpu",
) -> AnyTask:
    """The task that an expression names, for data with this many classes, labels or targets.

    >>> make_task("classification(smoothing=0.1)", 10).name
    'classification(smoothing=0.1)'
    """
    data = TaskData(num_classes, ignore_index, counts, str(device))
    try:
        term, made = TASKS.make(expression, data)
    except ConfigError as error:
        known = str(error).startswith("task '")
        raise error if known else ConfigError(f"task '{expression}': {error}") from None
    return cast(AnyTask, replace(cast(Any, made), name=str(term))) if is_dataclass(made) else made
