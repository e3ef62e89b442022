"""Updates of a traced program that are written over what they read, in place of a copy at its end."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves, tree_unflatten

from fednorm.core.state import Tree
from fednorm.engines.stack.kernels import adam_ops as adam_ops  # makes the operators known to torch
from fednorm.engines.stack.kernels import element_ops as element_ops
from fednorm.engines.stack.rewrites.nodes import may_be_view

_aten, _own = torch.ops.aten, torch.ops.fednorm
_UPDATES: dict[Any, tuple[Any, tuple[tuple[int, int], ...]]] = {
    _own.sgd.default: (_own.sgd_in_place.default, ((0, 0), (2, 1))),
    _own.adam.default: (_own.adam_in_place.default, ((0, 0), (2, 1), (3, 2), (4, 3))),
}
"""By the operator of an update: the same in place, and (argument, place among what is returned) of all it moves."""
IN_PLACE = frozenset(in_place for in_place, _ in _UPDATES.values())
_MOVED = {op: {read for read, _ in moves} for plain, (other, moves) in _UPDATES.items() for op in (plain, other)}
"""Of updates of either kind, which arguments they move."""


def write_in_place(traced: GraphModule, state: Tree) -> set[str]:
    """Let an optimizer write over the entries it moves, where nothing reads the old ones later; returns them.

    Such an entry is its own new value, which need not be put back.
    """
    graph = traced.graph
    entries = dict(zip(state, (node for node in graph.nodes if node.op == "placeholder"), strict=True))
    output = next(node for node in graph.nodes if node.op == "output")
    new: dict[str, Any] = tree_unflatten(output.args[0], traced._out_spec)[0]  # type: ignore[arg-type]
    written: set[str] = set()
    for update in [node for node in graph.nodes if node.target in _UPDATES]:
        in_place, moves = _UPDATES[update.target]
        pairs = [(update.args[read], place) for read, place in moves if update.args[read] is not None]
        keys = [_key_of(update, place, _whole(source), entries, new) for source, place in pairs]
        found = [key for key in keys if key is not None]
        if len(found) < len(keys) or any(read_elsewhere(update, entries[key]) for key in found):
            continue
        args = dict(enumerate(update.args)) | {read: _whole(update.args[read]) for read, _ in moves}
        with graph.inserting_before(update):
            graph.call_function(in_place, (*args.values(), None))  # nothing is rounded so far
        for key in found:
            moved = new[key]
            moved.replace_all_uses_with(entries[key])
        written.update(found)
    if written:
        graph.eliminate_dead_code()  # the updates that were replaced; those in place have an effect and stay
        traced.recompile()
    return written


def _key_of(update: Node, place: int, source: Any, entries: dict[str, Node], new: dict[str, Any]) -> str | None:
    """The entry that an update reads whole, and whose new value is what the update returns and nothing else reads."""
    for key, value in new.items():
        if entries.get(key) is source and isinstance(value, Node):
            result = _whole(value)
            alone = len(value.users) == 1 and (value is result or len(result.users) == 1)
            if result.target is operator.getitem and result.args == (update, place) and alone:
                return key
    return None


def _whole(node: Any) -> Any:
    """What a slice of all columns is a slice of."""
    while isinstance(node, Node) and node.target is _aten.slice.Tensor:
        source: Any = node.args[0]
        if source.meta["val"].shape != node.meta["val"].shape:
            break
        node = source
    return node


def read_elsewhere(update: Node, entry: Node) -> bool:
    """Whether a tensor, or a part of it, is read behind an update, or by it beside what it moves.

    A gradient may be a part of the weights, as those of a product of two are: one would be read after it was moved.
    """
    beside = set(tree_leaves([arg for place, arg in enumerate(update.args) if place not in _MOVED[update.target]]))
    parts, behind = {entry}, False
    for node in update.graph.nodes:
        if parts.intersection(beside if node is update else node.all_input_nodes):
            if behind or node is update:
                return True
            if may_be_view(node.target):
                parts.add(node)
        behind = behind or node is update
    return False
