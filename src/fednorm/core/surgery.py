"""What surgery on a model is: it changes the model's layers, found by type, and says what it did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class SurgeryReport:
    """How many layers a surgery changed, and one line a finding for the run's log."""

    changed: int
    notes: tuple[str, ...]
    target: str = "BatchNorm layer"
    """What the surgery looks for, for the error where there is none."""


Surgery = Callable[[nn.Module], tuple[nn.Module, SurgeryReport]]
"""model -> (model, report). It works on the model it is given, so pass a private copy; the root may be a new one."""
