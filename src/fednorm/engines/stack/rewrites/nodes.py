"""What all rewrites ask of a graph's nodes, and do with them."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node


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


def replace_call(graph: Graph, gone: Node, target: Any, args: tuple[Any, ...]) -> None:
    """Let another operator, with a result of the same shape and type, stand in a node's place."""
    with graph.inserting_before(gone):
        node = graph.call_function(target, args)
    values = [each.meta["val"] if isinstance(each, Node) else each for each in args]
    node.meta = {"val": target(*values)}
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
