"""Weights that layers read in a narrow type are rounded all at once, and read as parts of the rounded matrix."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fednorm.engines.stack.kernels import depth_ops as depth_ops  # makes the operators known to torch
from fednorm.engines.stack.kernels import element_ops as element_ops
from fednorm.engines.stack.kernels import layer_ops as layer_ops
from fednorm.engines.stack.rewrites.nodes import call

_aten, _own = torch.ops.aten, torch.ops.fednorm
_VIEWS = {
    _aten.slice.Tensor, _aten.split_with_sizes.default, _aten.reshape.default, _aten.view.default, _aten.t.default,
    _aten.permute.default, _aten.transpose.int, _aten.unsqueeze.default, _aten.expand.default, operator.getitem,
}  # fmt: skip


def read_weights_narrow(graph: Graph, layer: Node) -> None:
    """A layer of narrow activations reads its weights in that type."""
    x, w, *others = layer.args
    if isinstance(w, Node) and isinstance(x, Node):
        part = _narrow_part(graph, w, x.meta["val"].dtype)
        if part is not None:
            layer.args = (x, part, *others)


def read_cast_narrow(graph: Graph, cast: Node) -> None:
    """A part of the weights that is cast is that part of the rounded matrix."""
    source, kinds = cast.args[0], cast.kwargs
    if isinstance(source, Node) and kinds.keys() == {"dtype"}:
        part = _narrow_part(graph, source, kinds["dtype"])  # type: ignore[arg-type]
        if part is not None:
            cast.replace_all_uses_with(part)


def take_images_narrow(graph: Graph, images: Node) -> None:
    """Images that are rounded by all who read them are taken as such."""
    casts = list(images.users)
    alike = {(cast.target, *cast.kwargs.items()) for cast in casts}
    if len(alike) == 1 and casts[0].target is _aten._to_copy.default and casts[0].kwargs.keys() == {"dtype"}:
        images.args = (*images.args[:-1], casts[0].kwargs["dtype"])
        images.meta = casts[0].meta
        for cast in casts:
            cast.replace_all_uses_with(images)


def _narrow_part(graph: Graph, part: Node, dtype: torch.dtype) -> Node | None:
    """The same part of a matrix in a narrow type; None for what is no part of a matrix, or not wider."""
    if part.meta["val"].dtype != torch.float32 or dtype != torch.bfloat16:
        return None
    chain: list[Node] = []
    node = part
    while node.target in _VIEWS and not (node.target is operator.getitem and _is_own(node.args[0])):
        chain.append(node)
        source: Any = node.args[0]
        node = source
    value = node.meta.get("val")
    if not chain or not isinstance(value, Tensor) or value.dim() != 2:
        return None
    found = _call_after(graph, node, _own.narrowed.default, (node, dtype))
    for link in reversed(chain):
        found = _call_after(graph, link, link.target, (found, *link.args[1:]))
    return found


def _is_own(node: Any) -> bool:
    return isinstance(node, Node) and str(node.target).startswith("fednorm.")


def _call_after(graph: Graph, place: Node, target: Any, args: tuple[Any, ...]) -> Node:
    """A call behind a node, or the same one if it is there already."""
    source: Node = args[0]
    for user in source.users:
        if user.target is target and user.args == args:
            return user
    # Placeholders stay in front.
    while place.next.op == "placeholder":
        place = place.next
    with graph.inserting_after(max(place, source)):
        return call(graph, target, args)
