"""Dropped: copies, views and products that change nothing, and what was computed or joined before."""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from fednorm.engines.stack.rewrites.nodes import behind, same_type

_aten = torch.ops.aten
_SHAPES = {_aten.reshape.default, _aten.unsqueeze.default, _aten.expand.default}
"""Views of all numbers of a tensor in another shape, once `allow_any_strides` was there."""


def share_results(graph: Graph) -> None:
    """What is computed twice from the same is computed once."""
    seen: dict[str, Node] = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and str(node.target).startswith("aten."):
            # As text, in which 1, 1.0 and True are not equal.
            same = seen.setdefault(repr((str(node.target), node.args, node.kwargs)), node)
            if same is not node:
                node.replace_all_uses_with(same)
                graph.erase_node(node)


def drop_idle_permutation(graph: Graph, node: Node) -> None:
    """Axes that stay where they are, as mappings over clients leave many behind."""
    axes = _axes(node)
    if axes == sorted(axes):
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]


def _axes(permute: Node) -> list[int]:
    """The axes of a permutation, counted from the front."""
    axes: Any = permute.args[1]
    return [axis % len(axes) for axis in axes]


def allow_any_strides(graph: Graph, node: Node) -> None:
    """A view of what was a copy may now be one of its source, whose numbers lie elsewhere.

    And what an operator returns may lie otherwise than tracing foresaw. Where there can be a view, there still is one.
    """
    node.target, node.args = _aten.reshape.default, node.args[:2]


def drop_clone(graph: Graph, node: Node) -> None:
    """Nothing changes in place any more, so a copy is as good as its source; a new layout (with kwargs) stays."""
    if not node.kwargs:
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]


def drop_times_one(graph: Graph, product: Node) -> None:
    """A product with ones, which is how a gradient begins, is the other factor."""
    for one, other in (product.args, reversed(product.args)):
        first = behind(one, _SHAPES)
        ones = isinstance(first, Node) and first.target is _aten.ones_like.default
        if ones and isinstance(other, Node) and same_type(product, other):
            product.replace_all_uses_with(other)
            return


def drop_factor_one(graph: Graph, product: Node) -> None:
    """A product with the number 1, such as the bias of a linear layer in `addmm`, is the other factor."""
    other, number = product.args[:2]
    if number == 1 and isinstance(other, Node) and same_type(product, other):
        product.replace_all_uses_with(other)


def drop_rejoining(graph: Graph, cat: Node) -> None:
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
    source, sizes, dim = _split(split)
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


def _split(split: Node) -> tuple[Node, list[int], int]:
    """What is split, the sizes of the pieces, and the axis, counted from the front."""
    source, sizes, *dim = cast(Any, split.args)
    return source, sizes, (dim[0] if dim else split.kwargs.get("dim", 0)) % source.meta["val"].dim()


def _piece(node: Any) -> tuple[Node, int] | None:
    """Which piece of a split this is, seen through views that leave the order of its numbers as it was."""
    turned: Any = None
    width = node.meta["val"].shape[-1] if isinstance(node, Node) else 0
    while isinstance(node, Node):
        if node.target is _aten.reshape.default or node.target is _aten.view.default:
            if turned is not None:
                return None
        elif node.target is _aten.permute.default:
            axes = _axes(node)
            turned = axes if turned is None else [axes[axis] for axis in turned]
            turned = None if list(turned) == sorted(turned) else turned
        elif node.target is operator.getitem and turned is None:
            split, index = cast(Any, node.args)
            if split.target is not _aten.split_with_sizes.default:
                return None
            # Pieces along another axis than the last do not lie side by side, nor do rows of them made one long row.
            source, sizes, dim = _split(split)
            return (split, index) if dim == source.meta["val"].dim() - 1 and sizes[index] == width else None
        else:
            return None
        node = node.args[0]
    return None


def drop_copy(graph: Graph, node: Node) -> None:
    """A change in place that became a new tensor is that new tensor."""
    old, new = node.args[:2]
    if isinstance(old, Node) and isinstance(new, Node) and same_type(old, new):
        node.replace_all_uses_with(node.args[1])  # type: ignore[arg-type]
