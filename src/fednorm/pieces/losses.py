"""Penalties on a client's loss, from its parameters, their broadcast values and named numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fednorm.core.method import Numbers
from fednorm.core.step import Carry


@dataclass(frozen=True)
class Proximal:
    """(mu / 2) * sum ||w - w_t||^2 over all trained tensors (FedProx); mu is the number `prox.mu`."""

    def __call__(self, carry: Carry, numbers: Numbers) -> Tensor:
        squares = [(value - carry.anchor[key]).square().sum() for key, value in carry.params.items()]
        return numbers["prox.mu"] / 2 * torch.stack(squares).sum()


@dataclass(frozen=True)
class Distance:
    """(mu / 2) * ||w - w_t||, without the square: what FedBN's code does for Office and DomainNet.

    Its gradient at w = w_t is taken as zero; mu is the number `prox.mu`.
    """

    def __call__(self, carry: Carry, numbers: Numbers) -> Tensor:
        gap = torch.cat([(value - carry.anchor[key]).flatten() for key, value in carry.params.items()])
        return numbers["prox.mu"] / 2 * torch.linalg.vector_norm(gap)
