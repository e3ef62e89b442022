"""Rewrites of traced functions: fewer operators, the same numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

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


def equal_when_fused(function: Callable[..., Tensor], *examples: Tensor) -> Counter[str]:
    """Play a function traced and fused, and compare it with itself; returns its operators."""
    fused = fuse(trace(function, *examples))
    assert torch.equal(fused(*examples), function(*examples))
    return operators(fused)


@pytest.mark.parametrize("axes", [(-1, 0, 1), (2, -3, -2), (-3, -2, -1)])
def test_axes_may_be_counted_from_the_back(axes: tuple[int, ...]) -> None:
    found = equal_when_fused(lambda x: x.permute(axes) + 0, torch.randn(2, 3, 4))
    assert ("aten.permute.default" in found) == (axes != (-3, -2, -1))


def test_pieces_that_are_joined_as_they_lay_are_their_source() -> None:
    """A split need not name its axis, nor count it from the front."""
    equal_when_fused(lambda x: torch.cat(x.split([2, 4])) + 0, torch.randn(6))
    assert not equal_when_fused(lambda x: torch.cat(x.split([2, 4], -1), 1) + 0, torch.randn(3, 6))["aten.cat.default"]


def test_rows_of_pieces_that_became_one_long_row_are_joined() -> None:
    """As gates of a recurrent cell: each piece's rows one after the other, then the next piece's."""

    def gates(x: Tensor) -> Tensor:
        left, right = x.split([3, 3], -1)
        return torch.cat([left.reshape(2, -1), right.reshape(2, -1)], 1)

    assert equal_when_fused(gates, torch.randn(2, 5, 6))["aten.cat.default"] == 1


@pytest.mark.parametrize("wide", [False, True], ids=["a bias of its type", "a wider bias"])
def test_a_bias_of_a_wider_type_is_not_taken_in(wide: bool) -> None:
    """It widens the sum, and what follows is computed with that."""
    x, w = torch.randn(2, 3, 4, 5, 5).bfloat16(), torch.randn(2, 4, 4, 3, 3)
    bias = torch.randn(2, 1, 4, 1, 1, dtype=torch.float32 if wide else torch.bfloat16)

    def shifted(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return (torch.ops.fednorm.conv(x, w, 1, [1, 1]) + bias).relu()

    fused = fuse(trace(shifted, x, w, bias))
    assert ("aten.add.Tensor" in operators(fused)) == wide
    assert fused(x, w, bias).dtype == shifted(x, w, bias).dtype
