"""Fewer passes over matrices that have a row for each client: what begins, merges and judges a round."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from fednorm.engines.stack.rewrites.nodes import behind, call, only_user

_aten = torch.ops.aten


def round_at_once(graph: Graph, fold: Node) -> None:
    """A sum that is only rounded to another type is written in that one."""
    last = fold
    while (shaped := only_user(last, _aten.reshape.default)) is not None:
        last = shaped
    cast = only_user(last, _aten._to_copy.default)
    if cast is None or cast.kwargs.keys() != {"dtype"} or len(fold.args) > 2:
        return
    shape = cast.meta["val"].shape
    with graph.inserting_before(fold):
        narrow = call(graph, fold.target, (*fold.args, cast.kwargs["dtype"]))
    with graph.inserting_before(cast):
        cast.replace_all_uses_with(call(graph, _aten.reshape.default, (narrow, list(shape))))


def take_in_sum_of_row(graph: Graph, moved: Node) -> None:
    """Who reads rows to find out how far they moved can sum them up as well."""
    rows = behind(moved.args[0], {_aten.alias.default})
    for total in [node for node in rows.users if node.target is _aten.sum.dim_IntList and moved < node]:
        if total.args[1:] == ([1],) and dict(total.kwargs) == {"dtype": torch.float64}:
            with graph.inserting_before(total):
                total.replace_all_uses_with(call(graph, _aten.select.int, (moved, 0, 1)))


def begin_with_one_zero(graph: Graph, output: Node) -> None:
    """Entries that begin as zeros are filled with one number, not copied from as many."""
    returned: Any = output.args[0]
    for zeros in [node for node in returned if isinstance(node, Node) and node.target is _aten.zeros.default]:
        if list(zeros.users) == [output] and len(zeros.args[0]) > 1:  # type: ignore[arg-type]
            with graph.inserting_before(zeros):
                one = graph.call_function(zeros.target, ([1] * len(zeros.args[0]),), dict(zeros.kwargs))  # type: ignore[arg-type]
                one.meta = {"val": zeros.meta["val"].new_zeros([1] * zeros.meta["val"].dim())}
                zeros.replace_all_uses_with(call(graph, _aten.expand.default, (one, zeros.args[0])))
