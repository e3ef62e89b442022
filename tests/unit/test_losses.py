"""Penalties on the local loss, worked out by hand."""

from __future__ import annotations

import pytest
import torch

from fednorm.core.step import Carry
from fednorm.pieces.losses import Distance, Proximal

ANCHOR = {"w": torch.tensor([[1.0, 2.0]]), "b": torch.tensor([5.0])}
PARAMS = {"w": torch.tensor([[4.0, 2.0]]), "b": torch.tensor([9.0])}  # 3, 0 and 4 away: a distance of 5


def at(params: dict[str, torch.Tensor]) -> Carry:
    return Carry(params=params, state={}, optimizer={}, extras={}, anchor=ANCHOR)


@pytest.mark.parametrize(("penalty", "expected"), [(Proximal(), 0.1 / 2 * 25), (Distance(), 0.1 / 2 * 5)])
def test_the_distance_is_that_of_all_parameters_together(penalty: Proximal | Distance, expected: float) -> None:
    """And not the sum of the distances of each tensor, which would be 7."""
    assert penalty(at(PARAMS), {"prox.mu": 0.1}).item() == pytest.approx(expected)


@pytest.mark.parametrize("penalty", [Proximal(), Distance()])
def test_at_the_anchor_there_is_neither_penalty_nor_slope(penalty: Proximal | Distance) -> None:
    params = {key: value.clone().requires_grad_() for key, value in ANCHOR.items()}
    loss = penalty(at(params), {"prox.mu": 0.1})
    loss.backward()
    assert loss.item() == 0
    assert all(not value.grad.any() for value in params.values() if value.grad is not None)
