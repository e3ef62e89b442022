"""Rewrites of a traced step: what follows a batch norm or a gradient element by element joins its kernel.

A step is traced to a graph of operators, in which any model looks alike, however its author wrote it. Each rewrite
leaves the result as it was, up to the order of additions.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import functionalize
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fednorm.engines.kernels import element_ops, ops  # which also make their operators known to torch

_aten, _own = torch.ops.aten, torch.ops.fednorm
MOST_PARTS = 1024
"""Of more tiles a batch norm does not join the moments; it takes its own."""


def trace(function: Callable[..., Any], *examples: Any) -> GraphModule:
    """A function of tensors as a graph of operators without changes in place, for tensors shaped as the examples."""
    # Fake tensors: nothing runs, so kernels that fusion replaces are not even compiled. The lambda, because make_fx
    # counts the arguments of what it is given, and miscounts those of methods.
    fake = make_fx(functionalize(lambda *args: function(*args)), tracing_mode="fake", _allow_non_fake_inputs=True)
    traced = fake(*examples)
    for node in list(traced.graph.nodes):
        # What the function changed in its inputs is written back at the end; callers read what it returns.
        if node.target is _aten.copy_.default:
            traced.graph.erase_node(node)
    traced.graph.eliminate_dead_code()
    return traced


def fuse(traced: GraphModule) -> GraphModule:
    """The graph with the elementwise neighbours of batch norms and input gradients taken in."""
    secretive = any(node.target in _SECRETIVE for node in traced.graph.nodes)
    if not secretive:
        _share_results(traced.graph)
    for target, rewrite in _REWRITES if secretive else (*_COPIES, *_REWRITES):
        for node in list(traced.graph.nodes):
            if node.target is target:
                rewrite(traced.graph, node)
        traced.graph.eliminate_dead_code()  # a node that nobody needs would still count as a user
    traced.graph.lint()
    traced.recompile()
    return traced


def _share_results(graph: Graph) -> None:
    """What is computed twice from the same is computed once."""
    seen: dict[str, Node] = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and str(node.target).startswith("aten."):
            # As text, in which 1, 1.0 and True are not equal.
            same = seen.setdefault(repr((str(node.target), node.args, node.kwargs)), node)
            if same is not node:
                node.replace_all_uses_with(same)
                graph.erase_node(node)


def _take_in_residual_and_relu(graph: Graph, norm: Node) -> None:
    """relu(norm(x)) and relu(norm(x) + other) become one operator."""
    y = _output(norm, 0)
    if y is None:
        return
    add = _only_user(y, _aten.add.Tensor)
    other = _other_summand(add, y) if add else None
    relu = _only_user(add if add and other else y, _aten.relu.default)
    if relu is None or not _all_after(relu, [user for out in norm.users if out is not y for user in out.users]):
        return
    norm.kwargs = {**norm.kwargs, "relu": True} | ({"addend": other} if other else {})
    _move_before(relu, norm)
    relu.replace_all_uses_with(y)
    for gone in (relu, add) if add and other else (relu,):
        graph.erase_node(gone)


def _take_in_bias_and_relu(graph: Graph, conv: Node) -> None:
    """relu(conv(x) + bias), or conv(x) + bias, becomes one operator."""
    add = _only_user(conv, _aten.add.Tensor)
    bias = next((each for each in add.args if each is not conv), None) if add and not add.kwargs else None
    if isinstance(bias, Node) and add:
        clients, _, channels, *_ = shape = tuple(conv.meta["val"].shape)
        given = bias.meta["val"]
        if tuple(given.shape) == (clients, 1, channels, 1, 1) != shape:
            with graph.inserting_before(add):
                rows = graph.call_function(_aten.reshape.default, (bias, [clients, channels]))
            rows.meta = {"val": given.reshape(clients, channels)}
            conv.kwargs = {**conv.kwargs, "bias": rows}
            _replace_by(graph, add, conv)
    relu = _only_user(conv, _aten.relu.default)
    if relu:
        conv.kwargs = {**conv.kwargs, "relu": True}
        _replace_by(graph, relu, conv)


def _take_in_bias_grad(graph: Graph, behind: Node) -> None:
    """The gradient behind a convolution's ReLU, and its sum for the bias, are taken in one pass."""
    dy, y, threshold = behind.args
    total = next((user for user in behind.users if user.target is _aten.sum.dim_IntList), None)
    if threshold != 0 or not isinstance(y, Node) or y.target not in _CONVS or not total or total.kwargs:
        return
    if list(total.args[1]) != [1, 3, 4] or dy.meta["val"].dtype != y.meta["val"].dtype:  # type: ignore[union-attr, arg-type]
        return
    with graph.inserting_before(behind):
        both = graph.call_function(_own.relu_bias_grad.default, (dy, y))
        masked, sums = (graph.call_function(operator.getitem, (both, place)) for place in (0, 1))
        shaped = graph.call_function(_aten.reshape.default, (sums, list(total.meta["val"].shape)))
    masked.meta, shaped.meta = behind.meta, total.meta
    behind.replace_all_uses_with(masked)
    total.replace_all_uses_with(shaped)
    for gone in (total, behind):
        graph.erase_node(gone)


def _thin_at_once(graph: Graph, pad: Node) -> None:
    """Every so many-th row and column, and zeros as further channels, are one pass."""
    columns = pad.args[0]
    rows = columns.args[0] if _is_slice(columns, 4) else None  # type: ignore[union-attr]
    if not _is_slice(rows, 3) or any(pad.args[2:]) or not _pads_channels(pad):
        return
    x, stride = rows.args[0], rows.args[4]  # type: ignore[union-attr]
    before, after = cast(Any, pad.args[1])[4:]
    if columns.args[4] == stride and min(before, after) >= 0 and _channels_last(x):  # type: ignore[union-attr]
        _replace_call(graph, pad, _own.thin.default, (x, stride, before, after))


def _thin_grad_at_once(graph: Graph, rows: Node) -> None:
    """The way back of the same."""
    columns = rows.args[0]
    pad = columns.args[0] if _is_slice_grad(columns, 4) else None  # type: ignore[union-attr]
    if not _is_slice_grad(rows, 3) or not isinstance(pad, Node) or pad.target is not _aten.constant_pad_nd.default:
        return
    stride, (*_, height, width) = rows.args[5], cast(Any, rows.args[1])
    before, after = (-each for each in cast(Any, pad.args[1])[4:]) if _pads_channels(pad) else (-1, -1)
    if columns.args[5] == stride and min(before, after) >= 0 and _channels_last(pad.args[0]):  # type: ignore[union-attr]
        _replace_call(graph, rows, _own.thin_grad.default, (pad.args[0], [height, width], stride, before, after))


def _pads_channels(pad: Node) -> bool:
    """Whether a stack of images is padded, or cut, along the channels alone."""
    around = cast(Any, pad.args[1])
    return len(around) == 6 and not any(around[:4]) and pad.meta["val"].dim() == 5


def _channels_last(node: Any) -> bool:
    return element_ops.is_channels_last(node.meta["val"])


def _is_slice(node: Any, axis: int) -> bool:
    """Whether this is a slice from end to end along an axis."""
    plain = isinstance(node, Node) and node.target is _aten.slice.Tensor and len(node.args) == 5
    return plain and tuple(node.args[1:4]) == (axis, 0, sys.maxsize)


def _is_slice_grad(node: Any, axis: int) -> bool:
    plain = isinstance(node, Node) and node.target is _aten.slice_backward.default
    return plain and tuple(node.args[2:5]) == (axis, 0, sys.maxsize)


def _take_in_parts(graph: Graph, update: Node) -> None:
    """Gradients need not be joined before an update, which takes them side by side."""
    grads: Any = update.args[1]
    cat = grads[0] if len(grads) == 1 else None
    if isinstance(cat, Node) and cat.target is _aten.cat.default and cat.args[1:] == (1,) and len(cat.users) == 1:
        update.args = (update.args[0], list(cat.args[0]), *update.args[2:])  # type: ignore[call-overload]


def _share_moments(graph: Graph, norm: Node) -> None:
    """A batch norm that takes its statistics from a convolution's output gets their parts from the convolution."""
    conv, training = norm.args[0], norm.args[6]
    if not training or not isinstance(conv, Node) or conv.target is not _own.conv.default:
        return
    x, w = (each.meta["val"] for each in conv.args[:2])  # type: ignore[union-attr]
    y, rows = conv.meta["val"], ops.part_rows(x, w)
    if y.numel() // (y.shape[0] * y.shape[2]) > MOST_PARTS * rows:
        return
    with graph.inserting_before(conv):
        both = graph.call_function(_own.conv_moments.default, conv.args, conv.kwargs)
        first, parts = (graph.call_function(operator.getitem, (both, place)) for place in (0, 1))
    first.meta = conv.meta
    given = [each.meta["val"] if isinstance(each, Node) else each for each in conv.args]
    parts.meta = {"val": _own.conv_moments.default(*given)[1]}
    conv.replace_all_uses_with(first)
    graph.erase_node(conv)
    norm.kwargs = {**norm.kwargs, "parts": parts, "part_rows": rows}


def _take_in_relu_grad(graph: Graph, grad: Node) -> None:
    """The gradient of a batch norm whose ReLU was taken in starts from the gradient behind that ReLU."""
    x, behind = grad.args[:2]
    if not isinstance(behind, Node) or behind.target is not _aten.threshold_backward.default:
        return
    outer, y, threshold = behind.args
    norm = y.args[0] if isinstance(y, Node) and y.target is operator.getitem else None
    if threshold != 0 or not isinstance(norm, Node) or not norm.kwargs.get("relu") or norm.args[0] is not x:
        return
    behind.append(grad)
    for out in reversed(list(grad.users)):
        grad.append(out)
    grad.args = (x, outer, *grad.args[2:])
    grad.kwargs = {**grad.kwargs, "y": y}
    if behind.users:
        grad.kwargs = {**grad.kwargs, "masked": True}
        with graph.inserting_after(grad):
            masked = graph.call_function(operator.getitem, (grad, 3))
        masked.meta = behind.meta
        behind.replace_all_uses_with(masked)
    graph.erase_node(behind)


def _take_in_sum(graph: Graph, grad: Node) -> None:
    """Where a tensor was used twice its gradients are added: here, while one of them is made."""
    add = _only_user(grad, _aten.add.Tensor)
    other = _other_summand(add, grad) if add else None
    if add and other:
        grad.kwargs = {**grad.kwargs, "addend": other}
        _replace_by(graph, add, grad)


def _drop_idle_permutation(graph: Graph, node: Node) -> None:
    """Axes that stay where they are, as mappings over clients leave many behind."""
    source, axes = node.args
    if list(axes) == sorted(axes):  # type: ignore[arg-type]
        node.replace_all_uses_with(source)  # type: ignore[arg-type]


def _allow_any_strides(graph: Graph, node: Node) -> None:
    """A view of what was a copy may now be one of its source, whose numbers lie elsewhere."""
    node.target = _aten.reshape.default


def _drop_clone(graph: Graph, node: Node) -> None:
    """Nothing changes in place any more, so a copy is as good as its source; a new layout (with kwargs) stays."""
    if not node.kwargs:
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]


def _drop_rejoining(graph: Graph, cat: Node) -> None:
    """Entries of a split matrix that are joined again as they lay are a part of that matrix."""
    joined: Any = cat.args[0]
    last = cat.meta["val"].dim() - 1
    if cat.args[1:] != (last,):
        return
    runs: list[list[tuple[Node, int] | None]] = []
    for piece in map(_piece, joined):
        before = runs[-1][-1] if runs else None
        if piece and before and piece == (before[0], before[1] + 1):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    if len(runs) == len(joined):
        return
    parts, first = [], 0
    for run in runs:
        begin, end = run[0], run[-1]
        together = begin and end and begin is not end
        parts.append(_columns(graph, cat, begin[0], begin[1], end[1]) if together else joined[first])  # type: ignore[index]
        first += len(run)
    if len(parts) > 1:
        cat.args = (parts, last)
    else:
        cat.replace_all_uses_with(parts[0])


def _columns(graph: Graph, cat: Node, split: Node, first: int, last: int) -> Node:
    """The columns of a split matrix from one of its pieces to another, in the shape they have when joined."""
    source, sizes, dim = cast(Any, split.args)
    start, stop = sum(sizes[:first]), sum(sizes[: last + 1])
    shape = [*cat.meta["val"].shape[:-1], stop - start]
    with graph.inserting_before(cat):
        part = graph.call_function(_aten.slice.Tensor, (source, dim, start, stop))
        part.meta = {"val": source.meta["val"].narrow(dim, start, stop - start)}
        if list(part.meta["val"].shape) == shape:
            return part
        shaped = graph.call_function(_aten.reshape.default, (part, shape))
    shaped.meta = {"val": part.meta["val"].reshape(shape)}
    return shaped


def _piece(node: Any) -> tuple[Node, int] | None:
    """Which piece of a split this is, seen through views that leave the order of its numbers as it was."""
    turned: Any = None
    while isinstance(node, Node):
        if node.target is _aten.reshape.default or node.target is _aten.view.default:
            if turned is not None:
                return None
        elif node.target is _aten.permute.default:
            axes: Any = node.args[1]
            turned = axes if turned is None else [axes[place] for place in turned]
            turned = None if list(turned) == sorted(turned) else turned
        elif node.target is operator.getitem and turned is None:
            split, place = cast(Any, node.args)
            if split.target is not _aten.split_with_sizes.default:
                return None
            # Pieces along another axis than the last do not lie side by side.
            source, _, dim = split.args
            return (split, place) if dim == source.meta["val"].dim() - 1 else None
        else:
            return None
        node = node.args[0]
    return None


def _drop_copy(graph: Graph, node: Node) -> None:
    """A change in place that became a new tensor is that new tensor."""
    old, new = node.args[:2]
    if isinstance(old, Node) and isinstance(new, Node) and _alike(old, new):
        node.replace_all_uses_with(node.args[1])  # type: ignore[arg-type]


_CONVS = {_own.conv.default, _own.conv_moments.default}
_SECRETIVE = {_aten.native_batch_norm.default, _aten.cudnn_batch_norm.default}
"""Torch's own batch norms move running statistics in place without saying so: beside them copies must stay."""
_COPIES: tuple[tuple[Any, Callable[[Graph, Node], None]], ...] = (
    (_aten.view.default, _allow_any_strides),
    (_aten._unsafe_view.default, _allow_any_strides),
    (_aten.clone.default, _drop_clone),
)
_REWRITES: tuple[tuple[Any, Callable[[Graph, Node], None]], ...] = (
    (_aten.permute.default, _drop_idle_permutation),
    (_aten.copy.default, _drop_copy),
    (_aten.cat.default, _drop_rejoining),
    (_aten.constant_pad_nd.default, _thin_at_once),
    (_aten.slice_backward.default, _thin_grad_at_once),
    (_own.conv.default, _take_in_bias_and_relu),
    (_aten.threshold_backward.default, _take_in_bias_grad),
    (_own.sgd.default, _take_in_parts),
    (_own.norm.default, _take_in_residual_and_relu),
    (_own.norm.default, _share_moments),
    (_own.norm_grad.default, _take_in_relu_grad),
    (_own.conv_input_grad.default, _take_in_sum),
)


def _only_user(node: Node, target: Any) -> Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is target else None


def _output(node: Node, place: int) -> Node | None:
    """One of the tensors an operator returns."""
    return next((user for user in node.users if user.target is operator.getitem and user.args[1] == place), None)


def _other_summand(add: Node, node: Node) -> Node | None:
    """What an addition adds to a node, if it is a plain sum of two of a kind: nothing broadcast, no other type."""
    left, right = add.args[:2]
    other = right if left is node else left
    if add.kwargs or not isinstance(other, Node) or other is node:
        return None
    return other if _alike(node, other) else None


def _alike(left: Node, right: Node) -> bool:
    """Whether two are tensors of one shape and type."""
    a, b = left.meta.get("val"), right.meta.get("val")
    return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype


def _all_after(place: Node, nodes: list[Node]) -> bool:
    return all(place < node for node in nodes)


def _replace_call(graph: Graph, gone: Node, target: Any, args: tuple[Any, ...]) -> None:
    """Let another operator, with a result alike, stand in a node's place."""
    with graph.inserting_before(gone):
        node = graph.call_function(target, args)
    given = [each.meta["val"] if isinstance(each, Node) else each for each in args]
    node.meta = {"val": target(*given)}
    gone.replace_all_uses_with(node)
    graph.erase_node(gone)


def _replace_by(graph: Graph, gone: Node, node: Node) -> None:
    """Let an operator that took in its user stand in the user's place."""
    _move_before(gone, node)
    gone.replace_all_uses_with(node)
    graph.erase_node(gone)


def _move_before(place: Node, node: Node) -> None:
    """Move an operator and the picking of its outputs to just before another node."""
    place.prepend(node)
    for out in list(node.users):
        if out.target is operator.getitem:
            place.prepend(out)
