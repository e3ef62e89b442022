"""Max pooling in channels-last layout: gradients lie as the images do, and are to the bit what they were."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fednorm.layers.pooling import gradients_as_images


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()]))


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(3, 1)])
def test_the_layout_of_a_gradient_changes_no_bit(pool: nn.Module) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), pool, nn.Flatten(), nn.LazyLinear(2))
    x = torch.randn(5, 3, 10, 10).contiguous(memory_format=torch.channels_last).requires_grad_()
    model(x)
    before = gradients(model, x)
    seen: list[bool] = []
    model[1].register_full_backward_pre_hook(
        lambda module, grads: seen.append(grads[0].is_contiguous(memory_format=torch.channels_last))
    )
    with gradients_as_images(model):
        within = gradients(model, x)
    assert all(torch.equal(left, right) for left, right in zip(before, within, strict=True))
    assert seen == [True]
    assert not pool._forward_hooks


def test_poolings_that_learn_nothing_or_tell_their_indices_are_left_alone() -> None:
    pool = nn.MaxPool2d(2, return_indices=True)
    x = torch.arange(16.0).reshape(1, 1, 4, 4)
    with gradients_as_images(pool):
        values, indices = pool(x)
        assert torch.equal(nn.Sequential(nn.MaxPool2d(2))(x), values)
    assert indices.flatten().tolist() == [5, 7, 13, 15]
