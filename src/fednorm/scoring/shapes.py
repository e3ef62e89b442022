"""Outputs that must have the shape of their targets."""

from __future__ import annotations

from torch import Tensor

from fednorm.errors import ConfigError


def refuse_unequal(task: str, output: Tensor, y: Tensor) -> None:
    """Refuse outputs of another shape: torch would broadcast one against the other, and train on nonsense."""
    if output.shape != y.shape:
        raise ConfigError(
            f"task '{task}': the model's output has shape {tuple(output.shape)} for targets of shape {tuple(y.shape)}; "
            f"give a model with {y.shape[1] if y.dim() > 1 else 1} outputs"
        )
