"""What an optimizer's update reads: gradients as layers leave them, and some that it computes itself."""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_map_only

from fednorm.engines.stack.kernels.tiles import ALONE, FEW_ROWS
from fednorm.engines.stack.rewrites.nodes import behind, call

_aten, _own = torch.ops.aten, torch.ops.fednorm


def take_in_parts(graph: Graph, update: Node) -> None:
    """Gradients need not be joined before an update, which takes them side by side."""
    grads: Any = update.args[1]
    cat = grads[0] if len(grads) == 1 else None
    if isinstance(cat, Node) and cat.target is _aten.cat.default and cat.args[1:] == (1,) and len(cat.users) == 1:
        update.args = (update.args[0], list(cat.args[0]), *update.args[2:])  # type: ignore[call-overload]


def take_in_sums(graph: Graph, update: Node) -> None:
    """Gradients of filters are left in parts, which an update adds where it uses them, if nothing else reads them."""
    grads: Any = update.args[1]
    update.args = (update.args[0], [_in_parts(graph, grad) or grad for grad in grads], *update.args[2:])


def take_in_sums_of_images(graph: Graph, update: Node) -> None:
    """Gradients of a group norm's scales and shifts are left by image, too, if nothing but the update reads either."""
    grads: Any = update.args[1]
    summed: dict[Node, dict[Node, Node]] = defaultdict(dict)
    for grad in grads:
        row = behind(grad, {_aten.reshape.default})
        if isinstance(row, Node) and row.target is operator.getitem and row.args[1] in (1, 2):
            summed[row.args[0]][row] = grad  # type: ignore[index]
    by_image: dict[Node, Node] = {}
    for norm, rows in summed.items():
        read = [user for user in norm.users if user.args[1] in (1, 2)]
        if norm.target is not _own.group_norm_grad.default or rows.keys() != set(read):
            continue
        if not all(_only_leads_to(row, grad) for row, grad in rows.items()):
            continue
        with graph.inserting_before(norm):
            parts = graph.call_function(_own.group_norm_grad_parts.default, norm.args, norm.kwargs)
            parts.meta = {"val": parts.target(*_values(norm.args), **_values(norm.kwargs))}  # type: ignore[operator]
        with graph.inserting_before(update):
            by_image |= {grad: call(graph, operator.getitem, (parts, row.args[1])) for row, grad in rows.items()}
        norm.replace_all_uses_with(parts, delete_user_cb=lambda user, rows=rows: user not in rows)
    update.args = (update.args[0], [by_image.get(grad, grad) for grad in grads], *update.args[2:])


def _only_leads_to(row: Node, grad: Node) -> bool:
    """Whether what an operator returns is read as this gradient alone, seen through views."""
    while row is not grad and len(row.users) == 1:
        (row,) = row.users
    return row is grad and len(grad.users) == 1


def _values(args: Any) -> Any:
    return tree_map_only(Node, lambda node: node.meta["val"], args)


_IN_PARTS: dict[Any, Any] = {
    _own.conv_weight_grad.default: _own.conv_weight_grad_parts.default,
    _own.depthwise_weight_grad.default: _own.depthwise_weight_grad_parts.default,
}
_AS_IT_LIES = [0, 1, 3, 4, 2]
"""How the axes of a filter's gradient are permuted to be in the order they have in memory."""


def _in_parts(graph: Graph, row: Any) -> Node | None:
    """A gradient (client, number) in parts, if it is that of filters, as they lie in memory, and nothing else's."""
    chain = [row]
    for view in (_aten.reshape.default, _aten.permute.default):
        if isinstance(chain[-1], Node) and chain[-1].target is view:
            chain.append(chain[-1].args[0])
    grad = chain[-1]
    if not isinstance(grad, Node) or grad.target not in _IN_PARTS or any(len(node.users) > 1 for node in chain):
        return None
    turned, shape = chain[1:-1], grad.meta["val"].shape
    lies = turned[0].args[1] == _AS_IT_LIES if turned else shape[2] == 1
    if not lies or row.meta["val"].shape != (shape[0], shape[1:].numel()):
        return None
    with graph.inserting_before(grad):
        return call(graph, _IN_PARTS[grad.target], grad.args)


def drop_idle_bias_grads(graph: Graph, update: Node) -> None:
    """A bias in front of a batch norm, which takes the mean away again, has the gradient 0: a sum of no parts.

    Computed, it is the rounding of what the batch norm hands back.
    """
    grads: Any = update.args[1]
    left = []
    for grad in grads:
        taken = grad
        if isinstance(grad, Node) and _is_idle(grad):
            clients, numbers = grad.meta["val"].shape
            with graph.inserting_before(update):
                taken = call(graph, _aten.new_empty.default, (update.args[0], [clients, 0, numbers]))
        left.append(taken)
    update.args = (update.args[0], left, *update.args[2:])


def _is_idle(grad: Node) -> bool:
    """Whether a gradient is the sum over images and pixels of what a norm by batch statistics hands back."""
    total = behind(grad, {_aten.reshape.default, _aten._to_copy.default})
    if total.target is not _aten.sum.dim_IntList:
        return False
    shape = total.args[0].meta["val"].shape  # type: ignore[union-attr]
    handed = behind(total.args[0], {_aten.reshape.default})
    if handed.target is not operator.getitem or handed.args[1] != 0:
        return False
    norm: Any = handed.args[0]
    if norm.target is not _own.norm_grad.default or not norm.args[5]:
        return False
    kept = [axis for axis in range(len(shape)) if axis not in [each % len(shape) for each in total.args[1]]]  # type: ignore[union-attr]
    return kept == [0, 2] and shape[:3] == handed.meta["val"].shape[:3]


def take_in_products(graph: Graph, sgd: Node) -> None:
    """SGD computes the gradients of large linear layers' weights itself where nothing else asks for them."""
    value, gradients, velocity, *numbers = sgd.args[:6]
    grads: Any = gradients
    products = [_product(grad) for grad in grads]
    layers = [product.args for product in products if product]
    if layers:
        left = [None if product else grad for grad, product in zip(grads, products, strict=True)]
        sgd.args = (value, left, velocity, *numbers, *map(list, zip(*layers, strict=True)))  # type: ignore[assignment]


def _product(grad: Any) -> Node | None:
    """The operator that makes a gradient, if it is that of large weights from few rows, and the gradient's only use."""
    while isinstance(grad, Node) and grad.target is _aten.reshape.default and len(grad.users) == 1:
        grad = grad.args[0]
    if not isinstance(grad, Node) or grad.target is not _own.linear_weight_grad.default or len(grad.users) != 1:
        return None
    weights, x = grad.meta["val"], grad.args[0].meta["val"]  # type: ignore[union-attr]
    return grad if weights[0].numel() >= ALONE and x.shape[1] <= FEW_ROWS else None
