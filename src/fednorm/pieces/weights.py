"""Weights of the clients in a merge: pure functions of what the clients report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Report:
    """The numbers a client sends beside its tensors."""

    client: int
    num_examples: int
    losses: Mapping[str, float] = field(default_factory=dict)
    """Mean training loss without penalty terms, over `all` steps, the `last_epoch` and the `last_batch`."""
    scalars: Mapping[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """The mean training loss over the last local epoch."""
        return self.losses.get("last_epoch", math.nan)


def loss_summary(losses: Sequence[float], steps_per_epoch: int) -> dict[str, float]:
    """The losses of a client's steps as the three means a report carries.

    >>> loss_summary([4.0, 2.0, 1.0], steps_per_epoch=2)
    {'all': 2.3333333333333335, 'last_epoch': 1.5, 'last_batch': 1.0}
    """
    last = losses[-steps_per_epoch:]
    return {
        "all": math.fsum(losses) / len(losses),
        "last_epoch": math.fsum(last) / len(last),
        "last_batch": losses[-1],
    }


Weigh = Callable[[Sequence[Report]], list[float]]
"""Reports of the participants -> their weights, in the same order, with sum 1."""


def normalised(values: Sequence[float]) -> list[float]:
    """Values scaled to sum 1.

    >>> normalised([1, 3])
    [0.25, 0.75]
    """
    total = math.fsum(values)
    return [value / total for value in values]


def by_size(reports: Sequence[Report]) -> list[float]:
    """p_k = n_k / sum of n over the participants (McMahan et al. 2017)."""
    return normalised([report.num_examples for report in reports])


def uniform(reports: Sequence[Report]) -> list[float]:
    """p_k = 1 / number of participants."""
    return [1 / len(reports)] * len(reports)
