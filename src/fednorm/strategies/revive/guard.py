"""A loss that is not finite, or far above those before it, is left out: synthesis must not be thrown by one batch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

TIMES = 3.0
"""how many times the mean of the last accepted values is too much"""
NEEDED, REMEMBERED = 10, 20


@dataclass
class LossGuard:
    """The last accepted values of each loss, by its name."""

    accepted: dict[str, list[float]] = field(default_factory=dict[str, list[float]])

    def __call__(self, name: str, loss: Tensor) -> Tensor:
        """The loss, or zero without a gradient."""
        return loss if self.accepts(name, float(loss.detach())) else loss.new_zeros(())

    def accepts(self, name: str, value: float) -> bool:
        """Whether a loss counts; then it is remembered."""
        before = self.accepted.setdefault(name, [])
        if not math.isfinite(value):
            return False
        # By size: the adversarial loss is below zero.
        if len(before) >= NEEDED and abs(value) > TIMES * abs(math.fsum(before) / len(before)):
            return False
        self.accepted[name] = [*before, value][-REMEMBERED:]
        return True
