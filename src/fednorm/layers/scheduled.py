"""Layers that change during a training, by the global step they carry as a counter."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fednorm.errors import ConfigError


class Scheduled(nn.Module):
    """A layer that needs to know how many steps the whole training has; `set_total_steps` tells it."""

    total_steps: int | None = None

    def done(self, step: Tensor, dtype: torch.dtype) -> Tensor:
        """The share of the training that is over."""
        if not self.total_steps:
            raise ConfigError(
                f"{type(self).__name__} needs the number of training steps; call set_total_steps(model, steps) first"
            )
        return step.to(dtype) / self.total_steps


def set_total_steps(model: nn.Module, steps: int) -> None:
    """Tell every scheduled layer how many steps a client of the whole training takes."""
    for module in model.modules():
        if isinstance(module, Scheduled):
            module.total_steps = steps
