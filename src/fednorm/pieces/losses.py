"""Penalty terms on a client's loss: pure functions of its parameters, their broadcast values and named numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from fednorm.core.method import Numbers
from fednorm.core.state import Tree


def proximal(params: Tree, anchor: Tree, numbers: Numbers) -> Tensor:
    """(mu / 2) * sum ||w - w_t||^2 over all trained tensors (FedProx)."""
    squares = [(params[key] - anchor[key]).square().sum() for key in params]
    return numbers["prox.mu"] / 2 * torch.stack(squares).sum()


def distance(params: Tree, anchor: Tree, numbers: Numbers) -> Tensor:
    """(mu / 2) * ||w - w_t||, without the square: what FedBN's code does for Office and DomainNet.

    Its gradient at w = w_t is taken as zero.
    """
    gap = torch.cat([(params[key] - anchor[key]).flatten() for key in params])
    return numbers["prox.mu"] / 2 * torch.linalg.vector_norm(gap)
