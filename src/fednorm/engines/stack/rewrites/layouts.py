"""Operators that read memory by strides are given what they read as it lay when the graph was traced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fednorm.engines.stack.rewrites.nodes import may_be_view

_aten = torch.ops.aten
BY_STRIDES = (_aten.as_strided.default, _aten.as_strided_copy.default, _aten.as_strided_scatter.default)


def keep_traced_layout(graph: Graph, node: Node) -> None:
    """Rewrites, and operators whose outputs lie otherwise than foreseen, would have strides read elsewhere."""
    source: Any = node.args[0]
    value = source.meta["val"]
    alone = not may_be_view(source.target)
    with graph.inserting_before(node):
        laid = graph.call_function(laid_as, (source, list(value.stride()), value.storage_offset(), alone))
    laid.meta = {"val": value}
    node.args = (laid, *node.args[1:])


def laid_as(x: Tensor, strides: list[int], offset: int, alone: bool) -> Tensor:
    """x, with these strides and this offset in its storage: itself where it lies so, else a copy.

    What was not `alone` in its storage has others' numbers between its own, which may be what is read.

    >>> x = torch.arange(6.0).view(2, 3).t()
    >>> laid_as(x, [2, 1], 0, True).stride(), laid_as(x, [1, 3], 0, True) is x
    ((2, 1), True)
    """
    if list(x.stride()) == strides and x.storage_offset() == offset:
        return x
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True))
    if extent != x.numel() and not alone:
        raise RuntimeError("a part of a tensor is read by strides that were those of the whole")
    return x.new_empty(offset + extent).as_strided(x.shape, strides, offset).copy_(x)
