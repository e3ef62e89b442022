"""What follows a batch norm, a convolution or a gradient element by element joins its kernel."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fednorm.engines.stack.kernels import ops
from fednorm.engines.stack.kernels.tiles import DEPTH_PIXELS
from fednorm.engines.stack.rewrites.nodes import all_after, move_before, only_user, other_summand, output, replace_by

_aten, _own = torch.ops.aten, torch.ops.fednorm
_RELU_GRAD, _RELU6_GRAD = _aten.threshold_backward.default, _aten.hardtanh_backward.default
MOST_PARTS = 1024
"""Of more tiles a batch norm does not join the moments; it takes its own."""
_MOMENTS: dict[Any, Any] = {
    _own.conv.default: _own.conv_moments.default,
    _own.depthwise.default: _own.depthwise_moments.default,
}
"""Operators, and those that leave the moments of what they return too."""
_CONVS = {_own.conv.default, _own.conv_moments.default}


def look_behind_relu6(graph: Graph, behind: Node) -> None:
    """The gradient of a ReLU6 asks where its input was within bounds, which its output tells as well.

    So nothing but the ReLU6 reads its input, and the operator that made it can take the ReLU6 in.
    """
    dy, x, *bounds = behind.args
    shown = next((user for user in getattr(x, "users", ()) if user.target is _aten.hardtanh.default), None)
    if shown is not None and shown < behind and list(shown.args[1:]) == bounds:
        behind.args = (dy, shown, *bounds)


def _ceiling(relu6: Node, bounds: Any) -> float | None:
    """Where a hardtanh, or its gradient, ends, if it begins at 0 as a ReLU does."""
    plain = not relu6.kwargs and len(bounds) == 2 and bounds[0] == 0 < bounds[1]
    return float(bounds[1]) if plain else None


def take_in_residual_and_relu(graph: Graph, norm: Node) -> None:
    """relu(norm(x)), relu(norm(x) + other) and norm(x) + other become one operator; so do those with a ReLU6."""
    y = output(norm, 0)
    if y is None:
        return
    add = only_user(y, _aten.add.Tensor)
    other = other_summand(add, y) if add else None
    last = add if add and other else y
    relu, relu6 = only_user(last, _aten.relu.default), only_user(last, _aten.hardtanh.default)
    ceiling = _ceiling(relu6, relu6.args[1:]) if relu6 and norm.target is _own.norm.default else None
    shown = relu or (relu6 if ceiling else None) or last
    if shown is y or not all_after(shown, [user for out in norm.users if out is not y for user in out.users]):
        return
    norm.kwargs = {**norm.kwargs} | ({"addend": other} if other else {})
    if shown is not last:
        norm.kwargs = {**norm.kwargs, "relu": True} | ({"ceiling": ceiling} if ceiling else {})
    move_before(shown, norm)
    shown.replace_all_uses_with(y)
    for gone in dict.fromkeys((shown, last)):
        if gone is not y:
            graph.erase_node(gone)


def take_in_bias_and_relu(graph: Graph, conv: Node) -> None:
    """relu(conv(x) + bias), or conv(x) + bias, becomes one operator."""
    add = only_user(conv, _aten.add.Tensor)
    bias = next((each for each in add.args if each is not conv), None) if add and not add.kwargs else None
    if isinstance(bias, Node) and add:
        clients, _, channels, *_ = shape = tuple(conv.meta["val"].shape)
        value = bias.meta["val"]
        # A bias of a wider type widens the sum, which a convolution's own bias does not.
        same = add.meta["val"].dtype == conv.meta["val"].dtype
        if same and tuple(value.shape) == (clients, 1, channels, 1, 1) != shape:
            with graph.inserting_before(add):
                rows = graph.call_function(_aten.reshape.default, (bias, [clients, channels]))
            rows.meta = {"val": value.reshape(clients, channels)}
            conv.kwargs = {**conv.kwargs, "bias": rows}
            replace_by(graph, add, conv)
    relu = only_user(conv, _aten.relu.default)
    if relu:
        conv.kwargs = {**conv.kwargs, "relu": True}
        replace_by(graph, relu, conv)


def take_in_bias_grad(graph: Graph, behind: Node) -> None:
    """The gradient behind a convolution's ReLU, and its sum for the bias, are taken in one pass."""
    dy, y, threshold = behind.args
    total = next((user for user in behind.users if user.target is _aten.sum.dim_IntList), None)
    if threshold != 0 or not isinstance(y, Node) or y.target not in _CONVS or not total or total.kwargs:
        return
    if list(total.args[1]) != [1, 3, 4] or dy.meta["val"].dtype != y.meta["val"].dtype:  # type: ignore[union-attr, arg-type]
        return
    with graph.inserting_before(behind):
        both = graph.call_function(_own.relu_bias_grad.default, (dy, y))
        masked, sums = (graph.call_function(operator.getitem, (both, index)) for index in (0, 1))
        shaped = graph.call_function(_aten.reshape.default, (sums, list(total.meta["val"].shape)))
    masked.meta, shaped.meta = behind.meta, total.meta
    behind.replace_all_uses_with(masked)
    total.replace_all_uses_with(shaped)
    for gone in (total, behind):
        graph.erase_node(gone)


def share_moments(graph: Graph, norm: Node) -> None:
    """A batch norm that takes its statistics from a convolution's output gets their parts from the convolution."""
    conv, training = norm.args[0], norm.args[6]
    if not training or not isinstance(conv, Node) or conv.target not in _MOMENTS:
        return
    y: Tensor = conv.meta["val"]
    if conv.target is _own.depthwise.default:
        rows = DEPTH_PIXELS if y.shape[3] % 2 == 0 else 0
    else:
        rows = ops.part_rows(conv.args[1].meta["val"], y)  # type: ignore[union-attr]
    if y.numel() // (y.shape[0] * y.shape[2]) > MOST_PARTS * rows:
        return
    moments = _MOMENTS[conv.target]
    with graph.inserting_before(conv):
        both = graph.call_function(moments, conv.args, conv.kwargs)
        first, parts = (graph.call_function(operator.getitem, (both, index)) for index in (0, 1))
    first.meta = conv.meta
    values = [each.meta["val"] if isinstance(each, Node) else each for each in conv.args]
    parts.meta = {"val": moments(*values)[1]}
    conv.replace_all_uses_with(first)
    graph.erase_node(conv)
    norm.kwargs = {**norm.kwargs, "parts": parts, "part_rows": rows}


def take_in_relu_grad(graph: Graph, grad: Node) -> None:
    """The gradient of a batch norm whose ReLU was taken in starts from the gradient behind that ReLU."""
    x, behind = grad.args[:2]
    if not isinstance(behind, Node) or behind.target not in (_RELU_GRAD, _RELU6_GRAD):
        return
    outer, y, *bounds = behind.args
    norm = y.args[0] if isinstance(y, Node) and y.target is operator.getitem else None
    if not isinstance(norm, Node) or not norm.kwargs.get("relu") or norm.args[0] is not x:
        return
    ceiling = norm.kwargs.get("ceiling")
    if behind.target is _RELU_GRAD:
        fits = bounds == [0] and ceiling is None
    else:
        fits = ceiling is not None and _ceiling(behind, bounds) == ceiling
    if not fits:
        return
    behind.append(grad)
    for out in reversed(list(grad.users)):
        grad.append(out)
    grad.args = (x, outer, *grad.args[2:])
    anew = norm.target is _own.norm.default and ceiling is None and "addend" not in norm.kwargs
    shown = {"beta": norm.args[2]} if anew else {"y": y}
    grad.kwargs = {**grad.kwargs, **shown} | ({} if ceiling is None else {"ceiling": ceiling})
    if behind.users:
        grad.kwargs = {**grad.kwargs, "masked": True}
        with graph.inserting_after(grad):
            masked = graph.call_function(operator.getitem, (grad, 3))
        masked.meta = behind.meta
        behind.replace_all_uses_with(masked)
    graph.erase_node(behind)


def take_in_sum(graph: Graph, grad: Node) -> None:
    """Where a tensor was used twice its gradients are added: here, while one of them is made."""
    add = only_user(grad, _aten.add.Tensor)
    other = other_summand(add, grad) if add else None
    if add and other:
        grad.kwargs = {**grad.kwargs, "addend": other}
        replace_by(graph, add, grad)
