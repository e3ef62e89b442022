"""Numbers as targets, one or several for each example."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fednorm.core.task import Sums
from fednorm.scoring.shapes import refuse_unequal

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": functional.mse_loss,
    "l1": functional.l1_loss,
    "huber": functional.huber_loss,
}


@dataclass(frozen=True)
class Regression:
    """Squared, absolute or Huber loss; root mean squared error, mean absolute error and R2, of each target too.

    An output of shape (N, 1) for targets of shape (N,) is taken as (N,); any other difference is refused.
    """

    loss_name: str = "mse"
    name: str = "regression"
    kind: str = "regression"
    metric: str = "rmse"
    higher_is_better: bool = False
    percent: bool = False

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        output = self._as(output, y)
        return LOSSES[self.loss_name](output, y.to(output.dtype))

    def _as(self, output: Tensor, y: Tensor) -> Tensor:
        if output.dim() == 2 and y.dim() == 1 and output.shape[1] == 1:
            output = output.squeeze(1)
        refuse_unequal(self.name, output, y)
        return output

    def score(self, output: Tensor, y: Tensor) -> Sums:
        loss = self.loss(output, y).to(torch.float64) * len(y)
        targets = y.to(torch.float64).reshape(len(y), -1)
        error = self._as(output, y).to(torch.float64).reshape(len(y), -1) - targets
        return {
            "loss": loss,
            "squared": error.square().sum(0),
            "absolute": error.abs().sum(0),
            "targets": targets.sum(0),
            "targets_squared": targets.square().sum(0),
            "count": torch.tensor(float(len(y)), dtype=torch.float64, device=y.device),
        }

    def summary(self, sums: Mapping[str, Tensor]) -> dict[str, Any]:
        count = float(sums["count"])
        squared, absolute = ((sums[name] / count).tolist() for name in ("squared", "absolute"))
        spread = (sums["targets_squared"] / count - (sums["targets"] / count).square()).tolist()
        explained = [1 - error / own for error, own in zip(squared, spread, strict=True) if own > 0]
        found: dict[str, Any] = {
            "rmse": math.sqrt(sum(squared) / len(squared)),
            "mae": sum(absolute) / len(absolute),
            # Targets that are all equal leave nothing to explain.
            "r2": sum(explained) / len(explained) if len(explained) == len(spread) else None,
            "loss": float(sums["loss"]) / count,
        }
        return {**found, "per_target": [math.sqrt(each) for each in squared]} if len(squared) > 1 else found
