"""How the server joins one layer's tensors: pure functions, float64 inside, folded in the order given.

Callers pass the updates in ascending client id, so the order of arrival cannot change a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fednorm.state import Tree

Merge = Callable[[Tree, Sequence[Tree], Sequence[float], Tree], tuple[Tree, Tree]]
"""(server's old tensors of one layer, the clients' tensors, weights, memory) -> (new tensors, new memory).

The trees hold the entries of one kind in one layer, by part (`weight`, `running_var`, ...), so that a rule can treat a
mean and a variance together.
"""


def weighted_sum(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """sum_k p_k x_k in float64, left to right."""
    total = _wide(tensors[0]) * weights[0]
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        total.add_(_wide(tensor), alpha=weight)
    return total


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", torch.float64) if tensor.device.type == "mps" else tensor.to(torch.float64)


def mean(old: Tree, updates: Sequence[Tree], weights: Sequence[float], memory: Tree) -> tuple[Tree, Tree]:
    """Element-wise weighted mean: x = sum_k p_k x_k."""
    merged = {key: weighted_sum([update[key] for update in updates], weights) for key in old}
    return {key: value.to(old[key]) for key, value in merged.items()}, memory


def maximum(old: Tree, updates: Sequence[Tree], weights: Sequence[float], memory: Tree) -> tuple[Tree, Tree]:
    """Element-wise maximum, for counters: no order, no weights, no change of type."""
    return {key: torch.stack([update[key] for update in updates]).amax(0) for key in old}, memory
