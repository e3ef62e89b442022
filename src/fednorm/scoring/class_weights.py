"""Weights of classes in a loss: numbers, or from how many examples of each class there are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from fednorm.core.task import Sums
from fednorm.errors import ConfigError

BALANCED, EQUAL = "balanced", "equal"


def read_weights(text: str, counts: Sequence[int] | None, num_classes: int) -> tuple[float, ...]:
    """One weight for each class; none at all where all are equal.

    `balanced` weighs a class by n / (classes * n of the class), so that classes weigh the same altogether.

    >>> read_weights("balanced", [6, 2], 2), read_weights("0.2/0.8", None, 2), read_weights("equal", None, 2)
    ((0.6666666666666666, 2.0), (0.2, 0.8), ())
    """
    if text == EQUAL:
        return ()
    if text == BALANCED:
        if counts is None:
            raise ConfigError(
                "weights=balanced needs to know how many examples of each class all clients have; "
                "give numbers: weights=0.2/0.8"
            )
        total = sum(counts)
        return tuple(total / (num_classes * count) if count else 0.0 for count in counts)
    try:
        weights = tuple(float(word) for word in text.split("/"))
    except ValueError:
        raise ConfigError(f"weights={text} cannot be read; give balanced, equal, or numbers such as 0.2/0.8") from None
    if len(weights) != num_classes:
        raise ConfigError(
            f"weights={text} has {len(weights)} numbers for {num_classes} classes; give one for each, or balanced"
        )
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
        raise ConfigError(f"weights={text} is out of range; give numbers of 0 or more, one of them above 0")
    return weights


def check_smoothing(smoothing: float) -> float:
    """Refuse a label smoothing that leaves nothing of the label."""
    if not 0 <= smoothing < 1:
        raise ConfigError(f"smoothing={smoothing} is out of range; give 0 up to below 1")
    return smoothing


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy with weights of classes and label smoothing; labels may be ignored."""

    weights: tuple[float, ...] = ()
    smoothing: float = 0.0
    device: str = "cpu"
    _weight: Tensor | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Made once and where it is used: a copy from the host cannot be part of a program on a device.
        made = torch.tensor(self.weights, dtype=torch.float64, device=self.device) if self.weights else None
        object.__setattr__(self, "_weight", made)

    def __call__(self, output: Tensor, y: Tensor, ignored: int = -100, reduction: str = "mean") -> Tensor:
        """The loss of a batch; its mean is by weight."""
        weight = None if self._weight is None else self._weight.to(output.dtype)
        return functional.cross_entropy(
            output, y, weight=weight, ignore_index=ignored, reduction=reduction, label_smoothing=self.smoothing
        )

    def sums(self, output: Tensor, y: Tensor, ignored: int = -100) -> Sums:
        """Float64 sums over examples: of losses and, where classes have weights, of the weights they are divided by."""
        loss = self(output, y, ignored, "sum").to(torch.float64)
        return {"loss": loss} if self._weight is None else {"loss": loss, "weight": self._weight[y[y != ignored]].sum()}

    def mean(self, sums: Mapping[str, Tensor], count: float) -> float | None:
        """The mean loss of some sums over this many examples; None where no class that counts has one."""
        total = float(sums["weight"]) if self.weights else count
        return float(sums["loss"]) / total if total else None


PLAIN = CrossEntropy()
"""All classes weigh the same, labels are sure."""
