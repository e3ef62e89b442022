"""Shortcuts of residual blocks without weights, every n-th pixel and zeros as further channels: one pass."""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from fednorm.engines.stack.kernels import element_ops
from fednorm.engines.stack.rewrites.nodes import replace_call

_aten, _own = torch.ops.aten, torch.ops.fednorm


def thin_at_once(graph: Graph, pad: Node) -> None:
    """Every n-th row and column, and zeros as further channels, are one pass."""
    columns = pad.args[0]
    rows = columns.args[0] if _is_slice(columns, 4) else None  # type: ignore[union-attr]
    if not _is_slice(rows, 3) or any(pad.args[2:]) or not _pads_channels(pad):
        return
    x, stride = rows.args[0], rows.args[4]  # type: ignore[union-attr]
    before, after = cast(Any, pad.args[1])[4:]
    if columns.args[4] == stride and min(before, after) >= 0 and _channels_last(x):  # type: ignore[union-attr]
        replace_call(graph, pad, _own.thin.default, (x, stride, before, after))


def thin_grad_at_once(graph: Graph, rows: Node) -> None:
    """The way back of the same."""
    columns = rows.args[0]
    pad = columns.args[0] if _is_slice_grad(columns, 4) else None  # type: ignore[union-attr]
    if not _is_slice_grad(rows, 3) or not isinstance(pad, Node) or pad.target is not _aten.constant_pad_nd.default:
        return
    stride, (*_, height, width) = rows.args[5], cast(Any, rows.args[1])
    before, after = (-each for each in cast(Any, pad.args[1])[4:]) if _pads_channels(pad) else (-1, -1)
    if columns.args[5] == stride and min(before, after) >= 0 and _channels_last(pad.args[0]):  # type: ignore[union-attr]
        replace_call(graph, rows, _own.thin_grad.default, (pad.args[0], [height, width], stride, before, after))


def _pads_channels(pad: Node) -> bool:
    """Whether a stack of images is padded, or cut, along the channels alone."""
    around = cast(Any, pad.args[1])
    return len(around) == 6 and not any(around[:4]) and pad.meta["val"].dim() == 5


def _channels_last(node: Any) -> bool:
    return element_ops.is_channels_last(node.meta["val"])


def _is_slice(node: Any, axis: int) -> bool:
    """Whether this is a slice from end to end along an axis."""
    plain = isinstance(node, Node) and node.target is _aten.slice.Tensor and len(node.args) == 5
    return plain and tuple(node.args[1:4]) == (axis, 0, sys.maxsize)


def _is_slice_grad(node: Any, axis: int) -> bool:
    plain = isinstance(node, Node) and node.target is _aten.slice_backward.default
    return plain and tuple(node.args[2:5]) == (axis, 0, sys.maxsize)
