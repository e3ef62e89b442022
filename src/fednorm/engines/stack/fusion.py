"""A traced program, in which all models look the same, made shorter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fednorm.engines.stack.kernels import adam_ops as adam_ops  # makes the operator known to torch
from fednorm.engines.stack.rewrites import copies, layouts, narrow, neighbours, passes, shortcuts, updates

_aten, _own = torch.ops.aten, torch.ops.fednorm
Rewrite = tuple[Any, Callable[[Graph, Node], None]]
"""An operator, and what is done about a call of it."""
_SECRETIVE = {_aten.native_batch_norm.default, _aten.cudnn_batch_norm.default}
"""Torch's own batch norms move running statistics in place without saying so: beside them copies must stay."""
_COPIES: tuple[Rewrite, ...] = ((_aten.clone.default, copies.drop_clone),)
_VIEWS: tuple[Rewrite, ...] = (
    (_aten.view.default, copies.allow_any_strides),
    (_aten._unsafe_view.default, copies.allow_any_strides),
    (_aten._reshape_alias.default, copies.allow_any_strides),
)
_LAYOUTS: tuple[Rewrite, ...] = tuple((target, layouts.keep_traced_layout) for target in layouts.BY_STRIDES)
_REWRITES: tuple[Rewrite, ...] = (
    (_aten.permute.default, copies.drop_idle_permutation),
    (_aten.copy.default, copies.drop_copy),
    (_aten.cat.default, copies.drop_rejoining),
    (_aten.mul.Tensor, copies.drop_times_one),
    (_aten.mul.Scalar, copies.drop_factor_one),
    (_own.conv.default, narrow.read_weights_narrow),
    (_own.conv_input_grad.default, narrow.read_weights_narrow),
    (_own.depthwise.default, narrow.read_weights_narrow),
    (_own.depthwise_input_grad.default, narrow.read_weights_narrow),
    (_own.linear.default, narrow.read_weights_narrow),
    (_own.linear_input_grad.default, narrow.read_weights_narrow),
    (_aten._to_copy.default, narrow.read_cast_narrow),
    (_own.images.default, narrow.take_images_narrow),
    (_aten.constant_pad_nd.default, shortcuts.thin_at_once),
    (_aten.slice_backward.default, shortcuts.thin_grad_at_once),
    (_own.conv.default, neighbours.take_in_bias_and_relu),
    (_aten.threshold_backward.default, neighbours.take_in_bias_grad),
    (_own.sgd.default, updates.take_in_parts),
    (_own.adam.default, updates.take_in_parts),
    (_own.sgd.default, updates.take_in_sums),
    (_own.adam.default, updates.take_in_sums),
    (_own.sgd.default, updates.drop_idle_bias_grads),
    (_own.adam.default, updates.drop_idle_bias_grads),
    (_own.sgd.default, updates.take_in_products),
    (_aten.hardtanh_backward.default, neighbours.look_behind_relu6),
    (_own.norm.default, neighbours.take_in_residual_and_relu),
    (_own.norm.default, neighbours.share_moments),
    (_own.group_norm.default, neighbours.take_in_residual_and_relu),
    (_own.norm_grad.default, neighbours.take_in_relu_grad),
    (_own.group_norm_grad.default, neighbours.take_in_relu_grad),
    (_own.conv_input_grad.default, neighbours.take_in_sum),
    (_own.sgd.default, updates.take_in_sums_of_images),
    (_own.adam.default, updates.take_in_sums_of_images),
    (_own.fold.default, passes.round_at_once),
    (_own.moved.default, passes.take_in_sum_of_row),
    ("output", passes.begin_with_one_zero),
)


def fuse(traced: GraphModule) -> GraphModule:
    """The graph with the elementwise neighbours of batch norms and input gradients taken in."""
    secretive = any(node.target in _SECRETIVE for node in traced.graph.nodes)
    if not secretive:
        copies.share_results(traced.graph)
    for target, rewrite in (*_LAYOUTS, *_VIEWS, *(() if secretive else _COPIES), *_REWRITES):
        for node in list(traced.graph.nodes):
            if node.target is target:
                rewrite(traced.graph, node)
        traced.graph.eliminate_dead_code()  # a node that nobody needs would still count as a user
    traced.graph.lint()
    traced.recompile()
    return traced
