"""What all rewrites ask of a graph's nodes, and do with them."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, Node

_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
"""The one view whose schema does not say so."""


def may_be_view(target: Any) -> bool:
    """Whether an operator's result may be a part of what it was given, as its schema says; True for what has none."""
    if not isinstance(target, OpOverload):
        return True  # such as operator.getitem, of which no more is known
    return target is _UNSAFE_VIEW or any(out.alias_info for out in target._schema.returns)


def only_user(node: Node, target: Any) -> Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is target else None


def output(node: Node, index: int) -> Node | None:
    """One of the tensors an operator returns."""
    return next((user for user in node.users if user.target is operator.getitem and user.args[1] == index), None)


def other_summand(add: Node, node: Node) -> Node | None:
    """What an addition adds to a node, if it is a plain sum of two of a kind: nothing broadcast, no other type."""
    left, right = add.args[:2]
    other = right if left is node else left
    if add.kwargs or not isinstance(other, Node) or other is node:
        return None
    return other if same_type(node, other) else None


def same_type(left: Node, right: Node) -> bool:
    """Whether two are tensors of one shape and type."""
    a, b = left.meta.get("val"), right.meta.get("val")
    return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype


def all_after(first: Node, nodes: list[Node]) -> bool:
    return all(first < node for node in nodes)


def call(graph: Graph, target: Any, args: tuple[Any, ...]) -> Node:
    """A call at the place where the graph inserts, which knows what it returns."""
    node = graph.call_function(target, args)
    values = [each.meta["val"] if isinstance(each, Node) else each for each in args]
    node.meta = {"val": target(*values)}
    return node


def behind(node: Any, operators: Collection[Any]) -> Any:
    """What these operators, one upon the other, were given first."""
    while isinstance(node, Node) and node.target in operators:
        node = node.args[0]
    return node


def replace_call(graph: Graph, gone: Node, target: Any, args: tuple[Any, ...]) -> None:
    """Let another operator, with a result of the same shape and type, stand in a node's place."""
    with graph.inserting_before(gone):
        node = call(graph, target, args)
    gone.replace_all_uses_with(node)
    graph.erase_node(gone)


def replace_by(graph: Graph, gone: Node, node: Node) -> None:
    """Let an operator that took in its user stand in the user's place."""
    move_before(gone, node)
    gone.replace_all_uses_with(node)
    graph.erase_node(gone)


def move_before(target: Node, node: Node) -> None:
    """Move an operator and the picking of its outputs to just before another node."""
    target.prepend(node)
    for out in list(node.users):
        if out.target is operator.getitem:
            target.prepend(out)
