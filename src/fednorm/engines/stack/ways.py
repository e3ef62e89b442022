"""Ways to play a phase on the device, best first: one that fails is left for the next, which is slower but may work."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum

from torch import nn

from fednorm.core.phases import PhaseId
from fednorm.engines.stack.kernels.losses import LossesOfStacks
from fednorm.engines.stack.kernels.swapped import Swapped, dense, has_swapped, torchs_own
from fednorm.errors import first_line
from fednorm.halves.prepared_phase import PreparedPhase


class Way(Enum):
    """How a phase's programs are made; the text is what a user reads of it."""

    FUSED = "traced and fused"
    DENSE = "activations are copied into torch's layout behind each layer"
    PLAIN = "torch's own layers are used, and nothing is fused"

    @contextmanager
    def layers(self, model: nn.Module) -> Iterator[None]:
        """The layers of the model as this way has them, and the loss where there are stack operators at all."""
        if self is Way.PLAIN or not has_swapped(model):
            with torchs_own(model):
                yield
            return
        with dense(model) if self is Way.DENSE else nullcontext(), LossesOfStacks():
            yield


def _is_narrow(model: nn.Module) -> bool:
    return any(isinstance(module, Swapped) and module.narrow is not None for module in model.modules())


class Ways:
    """How each phase of a model is played."""

    def __init__(self, model: nn.Module) -> None:
        never = {Way.PLAIN} if _is_narrow(model) else set()  # torch's own layers would be wider than was asked for
        never |= set() if has_swapped(model) else {Way.DENSE}
        self._ways = [way for way in Way if way not in never]
        self._at: dict[PhaseId, int] = {}
        self._failed: dict[PhaseId, str] = {}

    def of(self, phase: PreparedPhase) -> Way:
        return self._ways[self._at.get(phase.id, 0)]

    def next(self, phase: PreparedPhase, error: Exception) -> bool:
        """Leave the way a phase failed by; False where there is no other, which is said in one line."""
        self._failed.setdefault(phase.id, first_line(error))
        self._at[phase.id] = self._at.get(phase.id, 0) + 1
        if self._at[phase.id] < len(self._ways):
            return True
        self._say(phase, "rounds cannot stay on the device", "clients are stacked step by step")
        return False

    def works(self, phase: PreparedPhase) -> None:
        """A phase was played by its way: one line says if that is not the best one, the first time."""
        if phase.id in self._failed:
            self._say(phase, f"'{phase.phase.name}' takes longer than it could", self.of(phase).value)

    def _say(self, phase: PreparedPhase, what: str, how: str) -> None:
        print(f"stacked engine: {what} ({self._failed.pop(phase.id)}); {how}", file=sys.stderr)
