"""What clients report beside their tensors, and the weights in a merge that follow from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fednorm.core.reductions import wide_device

LOSSES = ("all", "last_epoch", "last_batch")
"""The means of its training loss that a client reports."""


@dataclass(frozen=True)
class Report:
    """The numbers a client sends beside its tensors."""

    client: int
    num_examples: int
    losses: Mapping[str, float] = field(default_factory=dict[str, float])
    """Mean training loss without penalty terms, over `all` steps, the `last_epoch` and the `last_batch`."""
    scalars: Mapping[str, float] = field(default_factory=dict[str, float])

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


@dataclass(frozen=True)
class Reports:
    """The reports of a cohort as float64 vectors over its clients, ascending by client id."""

    num_examples: Tensor
    losses: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    scalars: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])

    @classmethod
    def of(cls, reports: Sequence[Report], device: torch.device | str = "cpu") -> Reports:
        """The vectors of some clients' reports, with the losses and scalars that all of them have.

        >>> Reports.of([Report(0, 3, {"all": 1.5}), Report(1, 5, {"all": 0.5, "last_batch": 0.25})]).losses
        {'all': tensor([1.5000, 0.5000], dtype=torch.float64)}
        """
        where = wide_device(torch.device(device))

        def vector(values: Iterable[float]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.float64, device=where)

        def vectors(each: Sequence[Mapping[str, float]]) -> dict[str, Tensor]:
            common = [name for name in each[0] if all(name in one for one in each)] if each else []
            return {name: vector(one[name] for one in each) for name in common}

        return cls(
            vector(report.num_examples for report in reports),
            vectors([report.losses for report in reports]),
            vectors([report.scalars for report in reports]),
        )


Layers = Mapping[str, Mapping[str, Tensor]]
"""What the clients send of one kind: by layer, then by part, each tensor with a leading client axis."""

Weigh = Callable[[Reports, Layers], Tensor]
"""(reports, what the clients send of the kind) -> the clients' weights, float64 with sum 1.

As in a merge, no value is asked for: a choice is a `torch.where`.
"""


def normalised(values: Tensor) -> Tensor:
    """A vector scaled to sum 1.

    >>> normalised(torch.tensor([1.0, 3.0]))
    tensor([0.2500, 0.7500])
    """
    # A running sum goes left to right on the host, alone or mapped over runs, where `sum` may take another order.
    total = values.cumsum(0)[-1] if values.device.type == "cpu" else values.sum()
    return values / total


@dataclass(frozen=True)
class BySize:
    """p_k = n_k / sum of n over the participants (McMahan et al. 2017)."""

    def __call__(self, reports: Reports, layers: Layers | None = None) -> Tensor:
        return normalised(reports.num_examples)


@dataclass(frozen=True)
class Uniform:
    """p_k = 1 / number of participants."""

    def __call__(self, reports: Reports, layers: Layers | None = None) -> Tensor:
        return torch.full_like(reports.num_examples, 1 / len(reports.num_examples))
