"""Rewrites of traced functions: fewer operators, the same numbers."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fednorm.engines.stack.fusion import fuse, trace


def operators(traced: torch.fx.GraphModule) -> Counter[str]:
    return Counter(str(node.target) for node in traced.graph.nodes if node.op == "call_function")


def shortcut(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Every second pixel, with two channels of zeros before and three after; and its gradient."""

    def thinned(x: Tensor) -> Tensor:
        return functional.pad(x[..., ::2, ::2], (0, 0, 0, 0, 2, 3))

    y, back = torch.func.vjp(thinned, x)
    return y, back(dy)[0]


@pytest.mark.parametrize("size", [6, 7])
def test_a_shortcut_of_a_stack_is_one_operator_each_way(size: int) -> None:
    x = torch.randn(2, 3, size, size, 4).permute(0, 1, 4, 2, 3)
    half = (size + 1) // 2
    dy = torch.randn(2, 3, half, half, 9).permute(0, 1, 4, 2, 3)
    fused = fuse(trace(shortcut, x, dy))
    assert operators(fused) == {"fednorm.thin.default": 1, "fednorm.thin_grad.default": 1}
    for got, wanted in zip(fused(x, dy), shortcut(x, dy), strict=True):
        assert torch.equal(got, wanted)
        assert got.permute(0, 1, 3, 4, 2).is_contiguous()


def test_images_that_lie_otherwise_keep_their_operators() -> None:
    """Where no kernel of ours has laid the channel last, a pass of ours would first have to move it."""
    x, dy = torch.randn(2, 3, 4, 6, 6), torch.randn(2, 3, 9, 3, 3)
    found = operators(fuse(trace(shortcut, x, dy)))
    assert not any(name.startswith("fednorm.") for name in found)
