"""Penalty terms on a client's loss: pure functions of its parameters, their broadcast values and named numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from fednorm.core.method import Numbers
from fednorm.core.step import Carry


def proximal(carry: Carry, numbers: Numbers) -> Tensor:
    """(mu / 2) * sum ||w - w_t||^2 over all trained tensors (FedProx)."""
    squares = [(value - carry.anchor[key]).square().sum() for key, value in carry.params.items()]
    return numbers["prox.mu"] / 2 * torch.stack(squares).sum()


def distance(carry: Carry, numbers: Numbers) -> Tensor:
    """(mu / 2) * ||w - w_t||, without the square: what FedBN's code does for Office and DomainNet.

    Its gradient at w = w_t is taken as zero.
    """
    gap = torch.cat([(value - carry.anchor[key]).flatten() for key, value in carry.params.items()])
    return numbers["prox.mu"] / 2 * torch.linalg.vector_norm(gap)
