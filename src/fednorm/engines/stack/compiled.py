"""A traced program whose loose operators torch's compiler joins into kernels, where that repays the time it takes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fednorm.core.state import Tree
from fednorm.engines.stack.in_place import IN_PLACE
from fednorm.engines.stack.kernels import element_ops as element_ops  # makes the operators known to torch
from fednorm.engines.stack.rewrites.nodes import may_be_view
from fednorm.errors import first_line

_AVERAGED: dict[Any, int] = {
    torch.ops.aten.avg_pool2d_backward.default: 2,
    torch.ops.aten.avg_pool3d_backward.default: 3,
}
"""Their axes; of windows that hang over the edge (`ceil_mode`) torch's compiler makes what is wrong (2.11 to 2.15)."""
_COUNTED = {torch.ops.aten.arange.default, torch.ops.aten.arange.start, torch.ops.aten.arange.start_step}
"""Numbers that it takes for indices, whose products never leave 64 bits; keyed draws multiply them so that they do."""
_LAUNCH = 3e-6
"""Seconds that a launch takes of a captured program, at least."""
_COMPILE = 0.03
"""Seconds that the compiler takes for an operator."""


def repays(traced: GraphModule, calls: int) -> bool:
    """Whether what so many calls of a program save by joined operators is more than compiling costs."""
    loose = sum(_is_loose(node.target) for node in traced.graph.nodes)
    return loose * calls * _LAUNCH > 2 * len(traced.graph.nodes) * _COMPILE


def _is_loose(target: Any) -> bool:
    """Whether an operator is one of torch's that computes something; views cost nothing."""
    return not may_be_view(target) and target.namespace == "aten"


def compiled(traced: GraphModule, state: Tree) -> Callable[[Tree], Any] | None:
    """The program as a function of a state, compiled; None where the compiler does not work, which is said."""
    try:
        return _compiled(traced, state)
    except Exception as error:  # a machine without a C compiler, an operator it does not know: of many types
        why = first_line(error)
        print(f"stacked engine: steps take longer than they could, torch's compiler failed ({why})", file=sys.stderr)
        return None


def _compiled(traced: GraphModule, state: Tree) -> Callable[[Tree], Any]:
    from torch._inductor.compile_fx import compile_fx

    graph = Graph()  # one that takes and returns tensors side by side, as the compiler wants them
    returned: Any = graph.graph_copy(traced.graph, {})
    # The compiler would let updates in place write elsewhere and copy that back, so they are called behind its program.
    updates = [node for node in graph.nodes if node.target in IN_PLACE]
    operators = [update.target for update in updates]
    wanted, spec = tree_flatten((list(returned), [update.args for update in updates]))
    for update in updates:
        graph.erase_node(update)
    for node in graph.nodes:
        _hide(node)
        _make_known(node.target)
    entries = {node: number for number, node in enumerate(graph.find_nodes(op="placeholder"))}
    graph.output([each for each in wanted if _is_made(each, entries)])
    with torch.no_grad(), torch._inductor.config.patch({"fallback_random": True}):  # pyright: ignore[reportAttributeAccessIssue]
        function: Any = compile_fx(GraphModule(traced, graph), tree_leaves(state))

    def call(state: Tree) -> Any:
        given = tree_leaves(state)
        with torch.no_grad():
            made = iter(function(*given))
            flat = [
                next(made) if _is_made(each, entries) else given[entries[each]] if isinstance(each, Node) else each
                for each in wanted
            ]
            moves, arguments = tree_unflatten(flat, spec)
            for operator, args in zip(operators, arguments, strict=True):
                operator(*args)
        return tree_unflatten(moves, traced._out_spec)  # type: ignore[arg-type]

    return call


def _hide(node: Node) -> None:
    """Leave to torch itself what its compiler gets wrong."""
    if node.target in _AVERAGED and node.args[5]:
        node.args = (*node.args, _AVERAGED[node.target])
        node.target = torch.ops.fednorm.overhanging_pool_grad.default
    elif node.target in _COUNTED and node.meta["val"].dtype == torch.int64:
        begin, end, step = {1: (0, *node.args, 1), 2: (*node.args, 1), 3: node.args}[len(node.args)]
        node.args, node.kwargs = (begin, end, step, node.meta["val"].device), {}
        node.target = torch.ops.fednorm.counted.default


def _make_known(target: Any) -> None:
    """Tell torch's compiler that an operator of ours is played as it is.

    One that it was not told of it plays too, but up to torch 2.11 writes into its log all that leads to the operator,
    which doubles with every layer: a program that takes seconds to compile took minutes.
    """
    from torch._inductor import lowering
    from torch._library.utils import get_layout_constraint_tag

    if getattr(target, "namespace", "") == "fednorm" and target not in lowering.lowerings:
        layout = lowering.tag_to_layout_constraint(get_layout_constraint_tag(target))
        lowering.make_fallback(target, layout, warn=False)


def _is_made(each: Any, entries: dict[Node, int]) -> bool:
    """Whether a program computes this, which is neither given to it nor a constant."""
    return isinstance(each, Node) and each not in entries
