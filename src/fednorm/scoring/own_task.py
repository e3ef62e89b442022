"""A task of one's own: a loss, and metrics that are averaged over examples or made of sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from fednorm.core.frozen import FrozenDict
from fednorm.core.task import Sums
from fednorm.errors import ConfigError, unknown

PerExample = Callable[[Any, Tensor], Tensor]
"""(output, targets) -> one value for each example, which are averaged."""


@runtime_checkable
class Metric(Protocol):
    """A number that is no mean over examples, such as F1 or R2: sums over them, and what the sums are worth."""

    def sums(self, output: Any, y: Tensor) -> Mapping[str, Tensor]:
        """Sums over the examples of a batch; those of several batches are added."""
        ...

    def value(self, sums: Mapping[str, Tensor]) -> float:
        """The number that sums stand for."""
        ...


@dataclass(frozen=True)
class Task:
    """What the outputs of a model mean: `loss(output, y)` is the mean over a batch, and so trained on and reported.

    The first metric is the headline unless `headline` names another; without metrics it is the loss, lower is better.

    >>> task = Task(lambda output, y: (output - y).square().mean(), {"mae": lambda output, y: (output - y).abs()},
    ...             higher_is_better=False)
    >>> task.summary(task.score(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 5.0])))
    {'mae': 1.5, 'loss': 2.5}
    """

    loss: Callable[[Any, Tensor], Tensor]
    metrics: Mapping[str, PerExample | Metric] = field(default_factory=dict[str, Any])
    headline: str = ""
    higher_is_better: bool = True
    percent: bool = False
    """whether the headline is between 0 and 100"""
    kind: str = ""
    """what the targets must be: classification, multilabel, regression or segmentation; empty: anything"""
    outputs: int | None = None
    """of models that are built by name; default: as many as the data has classes or targets"""
    name: str = "own"

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", FrozenDict(self.metrics))
        given = self.loss.loss if isinstance(self.loss, _Checked) else self.loss
        object.__setattr__(self, "loss", _Checked(given, self.name))
        if self.headline and self.headline not in self.metrics:
            raise unknown(f"headline of task '{self.name}'", self.headline, self.metrics)
        for name in self.metrics:
            if name in _TAKEN:
                raise ConfigError(f"task '{self.name}': a metric cannot be called '{name}'; choose another name")
        if not self.metrics:
            object.__setattr__(self, "higher_is_better", False)

    @property
    def metric(self) -> str:
        return self.headline or next(iter(self.metrics), "loss")

    def score(self, output: Any, y: Tensor) -> Sums:
        count = torch.tensor(float(len(y)), dtype=torch.float64, device=y.device)
        sums = {"loss": self.loss(output, y).to(torch.float64) * len(y), "count": count}
        for name, metric in self.metrics.items():
            if isinstance(metric, Metric):
                own = metric.sums(output, y)
                sums |= {f"{name}:{part}": torch.as_tensor(value).to(torch.float64) for part, value in own.items()}
                continue
            values = metric(output, y)
            if not isinstance(values, Tensor) or values.shape != y.shape[:1]:
                raise ConfigError(
                    f"task '{self.name}': metric '{name}' returned {_shown(values)} for {len(y)} examples; "
                    f"return one value for each, of shape ({len(y)},)"
                )
            sums[name] = values.to(torch.float64).sum()
        return sums

    def summary(self, sums: Mapping[str, Tensor]) -> dict[str, Any]:
        count = float(sums["count"])
        found: dict[str, Any] = {}
        for name, metric in self.metrics.items():
            if isinstance(metric, Metric):
                own = {key.removeprefix(f"{name}:"): each for key, each in sums.items() if key.startswith(f"{name}:")}
                found[name] = float(metric.value(own))
            else:
                found[name] = float(sums[name]) / count
        headline = {self.metric: found[self.metric]} if self.metrics else {}
        return {**headline, **found, "loss": float(sums["loss"]) / count}


_TAKEN = (
    "loss",
    "count",
    "worst",
    "per_client",
    "per_client_metrics",
    "per_domain",
    "per_class",
    "how",
    "sample",
    "round",
)
"""Names that a result has for something else."""


@dataclass(frozen=True)
class _Checked:
    """A loss whose result is looked at: a value for each example would be summed in silence."""

    loss: Callable[[Any, Tensor], Tensor]
    task: str

    def __call__(self, output: Any, y: Tensor) -> Tensor:
        found = self.loss(output, y)
        if not isinstance(cast(object, found), Tensor) or found.dim():
            raise ConfigError(
                f"task '{self.task}': its loss returned {_shown(found)}, expected one number as a tensor; "
                "return the mean over the batch"
            )
        return found


def _shown(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
