"""Factors on the learning rate of parts of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from fednorm.core.roles import head


@dataclass(frozen=True)
class HeadRate:
    """The head learns at a multiple of the rate of all else."""

    factor: float

    def __call__(self, model: nn.Module) -> Mapping[str, float]:
        return dict.fromkeys(head(model), self.factor)
