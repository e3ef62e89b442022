"""Penalty terms on a client's loss: pure functions of its parameters, their broadcast values and named numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from fednorm.method import Numbers
from fednorm.state import Tree


def proximal(params: Tree, anchor: Tree, numbers: Numbers) -> Tensor:
    """(mu / 2) * sum ||w - w_t||^2 over all trained tensors (FedProx)."""
    squares = [(params[key] - anchor[key]).square().sum() for key in params]
    return numbers["prox.mu"] / 2 * torch.stack(squares).sum()
