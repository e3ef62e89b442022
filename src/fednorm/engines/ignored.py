"""Settings of an engine that would do nothing are refused: who reads a result must be able to believe its config."""

from __future__ import annotations

import torch
from torch import nn

from fednorm.engines.base import Settings
from fednorm.engines.machine import refuse_other_than_cpu
from fednorm.engines.stack.kernels.layers import can_narrow
from fednorm.engines.stack.kernels.ops import HAS_TRITON
from fednorm.errors import ConfigError


def refuse_ignored(settings: Settings, device: torch.device, dtype: str) -> None:
    """Refuse engine settings that have no effect on this device."""
    name, given = settings.name, f"engine.precision={settings.precision}"
    if settings.workers and name not in ("auto", "workers"):
        raise ConfigError(
            f"engine.workers={settings.workers} does nothing with engine '{name}'; "
            "leave it out, or give --engine workers"
        )
    if name == "workers":
        refuse_other_than_cpu(device)
    if settings.precision == "fp32":
        return
    if device.type != "cuda":
        raise ConfigError(f"{given} does nothing on the device {device.type}; give fp32, or --device cuda")
    if settings.precision == "tf32" and dtype == "float64":
        raise ConfigError(f"{given} does nothing with train.dtype=float64; give fp32, or train.dtype=float32")
    if settings.precision == "bf16" and name not in ("auto", "stacked"):
        raise ConfigError(f"{given} does nothing with engine '{name}'; give tf32 or fp32, or --engine stacked")
    if settings.precision == "bf16" and not HAS_TRITON:
        raise ConfigError(f"{given} needs triton, which this torch does not bring; give tf32 or fp32")


def refuse_nothing_to_narrow(settings: Settings, model: nn.Module, name: str) -> None:
    """Refuse bf16 for a model without a layer that it is for."""
    if settings.precision == "bf16" and not can_narrow(model):
        wanted = "no plain convolution or large linear layer"
        raise ConfigError(f"engine.precision=bf16 finds {wanted} in {name} to act on; give tf32 or fp32")
