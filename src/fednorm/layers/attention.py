"""Attention with keyed dropout, in operations that can be mapped over clients."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Dropout = Callable[..., Tensor]
"""As `torch.nn.functional.dropout`."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    dropout: Dropout = functional.dropout,
) -> Tensor:
    """softmax(q k' / sqrt(d) + mask) v: `scaled_dot_product_attention` as plain products, with this dropout."""
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (part.repeat_interleave(repeats, -3) for part in (key, value))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * factor) @ key.transpose(-2, -1)
    if is_causal:
        kept = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~kept, -math.inf)
    if attn_mask is not None:
        masks = attn_mask.dtype is torch.bool
        scores = torch.where(attn_mask, scores, -math.inf) if masks else scores + attn_mask
    weights = torch.softmax(scores, -1)
    if attn_mask is not None:  # torch's own gives zeros where a query may look at nothing
        weights = torch.where(scores.isneginf().all(-1, keepdim=True), 0, weights)
    return dropout(weights, p=dropout_p) @ value


def _nothing_overridden(tensors: Any) -> bool:
    return False


def multi_head(attention: Callable[..., Tensor], dropout: Dropout) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Torch's `multi_head_attention_forward` with this attention and this dropout in the place of its own.

    The function is written in Python and offers no way in: a mode that stands in for functions sees it as a whole, and
    not what it calls. So its code is run with other globals, in which the question for modes is answered with no.
    """
    whole = functional.multi_head_attention_forward
    inner = {"has_torch_function": _nothing_overridden, "scaled_dot_product_attention": attention, "dropout": dropout}
    return FunctionType(whole.__code__, vars(functional) | inner, whole.__name__, whole.__defaults__)
