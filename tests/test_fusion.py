"""Rewrites of traced functions: fewer operators, the same numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fednorm.engines.stack.fusion import fuse
from fednorm.engines.stack.kernels.tiles import ALONE, FEW_ROWS
from fednorm.engines.stack.row_matrix import aligned
from fednorm.engines.stack.tracing import trace


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


@pytest.mark.parametrize("ceiling", [None, 0.5], ids=["relu", "relu6"])
@pytest.mark.parametrize("residual", [False, True])
def test_what_follows_a_norm_is_done_by_its_operator_each_way(residual: bool, ceiling: float | None) -> None:
    """relu(norm(x)), or relu(norm(x) + other), and the gradient behind that ReLU: no other operator is left."""
    own = torch.ops.fednorm
    gamma, beta, mean, var = (torch.rand(2, 4, dtype=torch.float64) + 0.5 for _ in range(4))
    counter = torch.zeros(2, dtype=torch.int64)
    x, other, dy = (torch.randn(2, 3, 4, 5, 5, dtype=torch.float64) for _ in range(3))

    def both_ways(x: Tensor, other: Tensor, dy: Tensor, gamma: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        normed, seen_mean, seen_var, *_ = own.norm(x, gamma, *state, True, 0.1, 1e-5)
        summed = normed + other if residual else normed
        if ceiling is None:
            y = summed.relu()
            behind = torch.ops.aten.threshold_backward(dy, y, 0)
        else:
            y = functional.hardtanh(summed, 0, ceiling)
            behind = torch.ops.aten.hardtanh_backward(dy, summed, 0, ceiling)
        dx = own.norm_grad(x, behind, seen_mean, seen_var, gamma, True, 1e-5)[0]
        return (y, dx, behind) if residual else (y, dx)

    given = (x, other, dy, gamma, beta, mean, var, counter)
    fused = fuse(trace(both_ways, *given))
    assert {name for name in operators(fused) if name != "<built-in function getitem>"} == {
        "fednorm.norm.default",
        "fednorm.norm_grad.default",
    }
    for got, wanted in zip(fused(*given), both_ways(*given), strict=True):
        assert torch.allclose(got, wanted, rtol=0, atol=1e-12)


def norm_of(x: Tensor) -> Tensor:
    """A batch norm without weights."""
    ones, zeros = torch.ones(x.shape[0], x.shape[2]), torch.zeros(x.shape[0], x.shape[2])
    return torch.ops.fednorm.norm(x, ones, zeros, zeros, ones, zeros[:, 0].long(), True, 0.1, 1e-5)[0]


def test_a_residual_without_an_activation_is_added_by_the_norm() -> None:
    found = equal_when_fused(lambda x, other: norm_of(x) + other, *torch.randn(2, 2, 3, 4, 5, 5))
    assert not found["aten.add.Tensor"]


@pytest.mark.parametrize("bounds", [(-1, 1), (0.5, 6)])
def test_bounds_that_do_not_begin_at_0_are_no_relu(bounds: tuple[float, float]) -> None:
    found = equal_when_fused(lambda x: functional.hardtanh(norm_of(x), *bounds), torch.randn(2, 3, 4, 5, 5))
    assert found["aten.hardtanh.default"] == 1


def test_an_activation_whose_input_others_read_stays() -> None:
    def both(x: Tensor) -> Tensor:
        normed = norm_of(x)
        return functional.relu6(normed) + normed.exp()

    assert equal_when_fused(both, torch.randn(2, 3, 4, 5, 5))["aten.hardtanh.default"] == 1


@pytest.mark.parametrize("residual", [False, True])
def test_what_follows_a_group_norm_is_done_by_its_operator(residual: bool) -> None:
    gamma, beta = torch.rand(2, 4), torch.rand(2, 4)

    def shown(x: Tensor, other: Tensor) -> Tensor:
        normed = torch.ops.fednorm.group_norm(x, gamma, beta, 2, 1e-5)[0]
        return (normed + other if residual else normed).relu()

    found = equal_when_fused(shown, torch.randn(2, 3, 4, 5, 5), torch.randn(2, 3, 4, 5, 5))
    assert not found.keys() & {"aten.relu.default", "aten.add.Tensor"}


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


def test_weights_are_rounded_once_for_all_layers_that_read_them() -> None:
    """Whatever reads a part of the matrix in a narrow type: two operators, and a cast of torch's own."""
    flat = torch.randn(2, 4 * 3 * 9 + 5 * 4 + 3)
    x = torch.randn(2, 3, 3, 5, 5).bfloat16()

    def layers(flat: Tensor, x: Tensor) -> Tensor:
        filters, matrix, shift = flat.split([108, 20, 3], 1)
        y = torch.ops.fednorm.conv(x, filters.view(2, 4, 3, 3, 3), 1, [1, 1]).mean((3, 4))
        y = torch.ops.fednorm.linear(y, matrix.view(2, 5, 4))
        return y.sum((1, 2)) + shift.to(torch.bfloat16).sum(1) + flat[:, :2].sum(1)

    fused = fuse(trace(layers, flat, x))
    assert operators(fused)["fednorm.narrowed.default"] == 1
    assert operators(fused)["aten._to_copy.default"] == 0
    assert torch.equal(fused(flat, x), layers(flat, x))


@pytest.mark.parametrize("read", [False, True], ids=["only by SGD", "by others too"])
@pytest.mark.parametrize(("rows", "width"), [(5, 64), (5, 32), (300, 64)])
def test_gradients_of_large_linear_layers_are_computed_where_they_are_used(rows: int, width: int, read: bool) -> None:
    """Of 1,024 outputs: a width of 64 makes enough weights; of many rows a product is not computed on the way."""
    size, outs = 1024 * width, 1024
    x, dy = torch.randn(2, rows, width), torch.randn(2, rows, outs)
    value, velocity = torch.randn(2, size + outs), torch.randn(2, size + outs)
    rates = [torch.rand(2) for _ in range(3)]

    def updated(value: Tensor, velocity: Tensor, x: Tensor, dy: Tensor, *rates: Tensor) -> tuple[Tensor, ...]:
        grad = torch.ops.fednorm.linear_weight_grad(x, dy)
        both = torch.cat([grad.reshape(2, -1), dy.sum(1)], 1)
        moved = torch.ops.fednorm.sgd(value, [both], velocity, *rates, [], [])
        return (*moved, grad.square().sum()) if read else moved

    given = value, velocity, x, dy, *rates
    fused = fuse(trace(updated, *given))
    for found, wanted in zip(fused(*given), updated(*given), strict=True):
        assert torch.equal(found, wanted)
    taken = "fednorm.linear_weight_grad.default" not in operators(fused)
    assert taken == (size >= ALONE and rows <= FEW_ROWS and not read)


def test_rounded_rows_begin_at_aligned_addresses() -> None:
    for flat in (torch.randn(3, 37), aligned(torch.randn(3, 37)), torch.randn(37, 3).t()):
        narrow = torch.ops.fednorm.narrowed(flat, torch.bfloat16)
        assert torch.equal(narrow, flat.bfloat16())
        assert narrow.stride() == (48, 1)
