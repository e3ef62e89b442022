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
    (grad,) = fused.graph.find_nodes(op="call_function", target=own.norm_grad.default)
    assert ("beta" if ceiling is None and not residual else "y") in grad.kwargs
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


def test_a_bias_times_one_is_not_computed() -> None:
    x, w, bias = torch.randn(2, 3, 4), torch.randn(2, 5, 4), torch.randn(2, 5)
    layers = torch.vmap(lambda x, w, bias: torch.addmm(bias, x, w.t()) + functional.linear(x, w, bias))
    found = fuse(trace(layers, x, w, bias))
    assert operators(trace(layers, x, w, bias))["aten.mul.Scalar"] == 2
    assert operators(found)["aten.mul.Scalar"] == 0
    assert torch.equal(found(x, w, bias), layers(x, w, bias))


@pytest.mark.parametrize("change", [None, "read by others too", "in another order"])
@pytest.mark.parametrize("update", ["sgd", "adam"])
def test_gradients_of_filters_are_added_up_where_they_are_used(update: str, change: str | None) -> None:
    """Kernels leave them in parts. Those of one channel for each filter lie in memory as torch's own do."""
    x, dy, deep, behind = (torch.randn(2, 3, channels, 6, 6) for channels in (4, 5, 4, 4))
    size = 5 * 4 * 9 + 4 * 9
    state = [torch.randn(2, size).abs() for _ in range(4 if update == "adam" else 2)]
    rates = [torch.rand(2) for _ in range(2 if update == "adam" else 3)]

    def updated(x: Tensor, dy: Tensor, deep: Tensor, behind: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        full = torch.ops.fednorm.conv_weight_grad(x, dy, [3, 3], 1, [1, 1])
        thin = torch.ops.fednorm.depthwise_weight_grad(deep, behind, [3, 3], 1, [1, 1], 1)
        row = full if change == "in another order" else full.permute(0, 1, 3, 4, 2)
        grads = [torch.cat([row.reshape(2, -1), thin.reshape(2, -1)], 1)]
        if update == "adam":
            moved = torch.ops.fednorm.adam(given[0], grads, *given[1:], 0.9, 0.99, 1e-8, False)
        else:
            value, velocity, *numbers = given
            moved = torch.ops.fednorm.sgd(value, grads, velocity, *numbers, [], [])
        return (*moved, full.square().sum()) if change == "read by others too" else moved

    given = x, dy, deep, behind, *state, *rates
    fused = fuse(trace(updated, *given))
    for found, wanted in zip(fused(*given), updated(*given), strict=True):
        assert torch.equal(found, wanted)
    names = operators(fused)
    assert names["fednorm.depthwise_weight_grad_parts.default"] == 1
    assert names["fednorm.conv_weight_grad_parts.default"] == (change is None)
    assert names["fednorm.conv_weight_grad.default"] == (change is not None)


@pytest.mark.parametrize("flat", [False, True], ids=["images", "rows"])
@pytest.mark.parametrize("training", [True, False])
def test_a_bias_that_a_batch_norm_takes_away_has_no_gradient(training: bool, flat: bool) -> None:
    """Only where the norm goes by the batch; what is summed otherwise is computed as ever."""
    x, dy = torch.randn(2, 6, 3, 4, 4).double(), torch.randn(2, 6, 3, 4, 4).double()
    x, dy = (x[..., :1, :1], dy[..., :1, :1]) if flat else (x, dy)
    mean, var, gamma = (torch.rand(2, 3).double() for _ in range(3))
    if training:
        var, mean = torch.var_mean(x, (1, 3, 4), correction=0)
    value, rates = torch.randn(2, 9).double(), [torch.rand(2).double() for _ in range(3)]

    def updated(x: Tensor, dy: Tensor, value: Tensor, *rates: Tensor) -> Tensor:
        dx, dgamma, _, _ = torch.ops.fednorm.norm_grad(x, dy, mean, var, gamma, training, 1e-5)
        bias = dx.view(2, 6, 3).sum(1) if flat else dx.sum((1, 3, 4), keepdim=True).view(2, 3)
        other = dx.sum((2, 3, 4))[:, :3]
        return torch.ops.fednorm.sgd(value, [torch.cat([dgamma, bias, other], 1)], None, *rates, [], [])[0]

    given = x, dy, value, *rates
    fused = fuse(trace(updated, *given))
    assert torch.allclose(fused(*given), updated(*given), atol=1e-12)
    assert operators(fused)["aten.sum.dim_IntList"] == (1 if training else 2)


def test_rounded_rows_begin_at_aligned_addresses() -> None:
    for flat in (torch.randn(3, 37), aligned(torch.randn(3, 37)), torch.randn(37, 3).t()):
        narrow = torch.ops.fednorm.narrowed(flat, torch.bfloat16)
        assert torch.equal(narrow, flat.bfloat16())
        assert narrow.stride() == (48, 1)
