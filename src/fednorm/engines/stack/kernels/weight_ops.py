"""Operators over a stack of clients for weights that are standardised, each with its reference in plain torch.

As in `fednorm.engines.stack.kernels.ops`, kernels run where they fit, the references elsewhere.
"""
# torch.library reads the annotations of an operator, so this file does without `from __future__ import annotations`.

import torch
from torch import Tensor

from fednorm.engines.stack.kernels.ops import channels_last, channels_second, filters, kernels_fit
from fednorm.layers.ws_conv import Standard

_MOST = 1 << 14
"""Numbers of a filter that a program holds at once."""


def _kernels_fit(w: Tensor) -> bool:
    return kernels_fit(w) and w.dtype == torch.float32 and w[0, 0].numel() <= _MOST


@torch.library.custom_op("fednorm::standardise", mutates_args=())
def standardise(w: Tensor, gain: float, divisor: float, floor: float, offset: float) -> Tensor:
    """Filters (client, out, in, height, width), each with mean zero and a norm or deviation; see `Standard`."""
    if _kernels_fit(w):
        from fednorm.engines.stack.kernels.standard import run_standardise

        return channels_second(run_standardise(filters(w), Standard(gain, divisor, floor, offset)))
    each = Standard(gain, divisor, floor, offset)(w.flatten(0, 1))
    return channels_second(channels_last(each.view(w.shape)))


@torch.library.custom_op("fednorm::standardise_grad", mutates_args=())
def standardise_grad(w: Tensor, dy: Tensor, gain: float, divisor: float, floor: float, offset: float) -> Tensor:
    """The gradient of the filters before they were standardised."""
    if _kernels_fit(w):
        from fednorm.engines.stack.kernels.standard import run_standardise

        each = Standard(gain, divisor, floor, offset)
        return channels_second(run_standardise(filters(w), each, channels_last(dy)))
    wide = w.flatten(2)
    centred = wide - wide.mean(2, keepdim=True)
    norm = torch.linalg.vector_norm(centred, dim=2, keepdim=True)
    bounded = (norm / divisor).clamp_min(floor)
    scale = gain / (bounded + offset)
    along = (dy.flatten(2) * centred).sum(2, keepdim=True)
    moves = (norm > 0) & (norm / divisor >= floor)
    turned = torch.where(moves, scale * along / ((bounded + offset) * divisor * norm), 0)
    away = scale * dy.flatten(2) - turned * centred
    return channels_second(channels_last((away - away.mean(2, keepdim=True)).view(w.shape)))


@standardise.register_fake
def _(w: Tensor, gain: float, divisor: float, floor: float, offset: float) -> Tensor:
    return channels_second(channels_last(w.new_empty(w.shape)))


@standardise_grad.register_fake
def _(w: Tensor, dy: Tensor, gain: float, divisor: float, floor: float, offset: float) -> Tensor:
    return channels_second(channels_last(w.new_empty(w.shape)))
