"""Steps of a phase that have settings."""

from __future__ import annotations

from dataclasses import dataclass

from fednorm.core.step import Step, StepSpec
from fednorm.pieces.moments import Mode, moments_step


@dataclass(frozen=True)
class TakeMoments:
    """Take the batch norms' statistics anew from the batches shown (`moments_step`)."""

    mode: Mode

    def __call__(self, spec: StepSpec) -> Step:
        return moments_step(self.mode)(spec)
