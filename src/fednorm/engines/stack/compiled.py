"""A traced program whose loose operators torch's compiler joins into kernels, where that repays the time it takes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule
from torch.utils._pytree import tree_leaves, tree_unflatten

from fednorm.core.state import Tree
from fednorm.engines.stack.rewrites.nodes import may_be_view
from fednorm.errors import first_line

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
    graph.output(graph.graph_copy(traced.graph, {}))
    plain = GraphModule(traced, graph)
    with torch.no_grad(), torch._inductor.config.patch({"fallback_random": True}):  # pyright: ignore[reportAttributeAccessIssue]
        function: Any = compile_fx(plain, tree_leaves(state))

    def call(state: Tree) -> Any:
        with torch.no_grad():
            return tree_unflatten(function(*tree_leaves(state)), traced._out_spec)  # type: ignore[arg-type]

    return call
