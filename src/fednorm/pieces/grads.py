"""Transforms of a client's gradients, applied in the order of the parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fednorm.core.method import Facts, Numbers
from fednorm.core.state import Tree
from fednorm.core.step import Carry


def unit_norms(tensor: Tensor) -> Tensor:
    """The L2 norm of each unit, kept for broadcasting: a unit is an output row, or the whole of a vector.

    >>> unit_norms(torch.tensor([[3.0, 4.0], [0.0, 2.0]])).flatten().tolist()
    [5.0, 2.0]
    """
    axes = tuple(range(1, tensor.dim())) if tensor.dim() > 1 else tuple(range(tensor.dim()))
    return torch.sqrt(tensor.square().sum(axes, keepdim=True)) if axes else tensor.abs()


@dataclass(frozen=True)
class AdaptiveClip:
    """Adaptive gradient clipping: ||g|| <= clip * max(||w||, 1e-3) for each unit (Brock et al. 2021b).

    The last linear layer is left alone, as its authors advise; clip is the number `agc.clip`.
    """

    def __call__(self, grads: Tree, carry: Carry, numbers: Numbers, facts: Facts) -> Tree:
        clip = numbers["agc.clip"]

        def clipped(key: str) -> Tensor:
            grad = grads[key]
            if key in facts.head:
                return grad
            bound = clip * unit_norms(carry.params[key]).clamp(min=1e-3)
            norm = unit_norms(grad)
            return torch.where(norm > bound, grad * (bound / norm.clamp(min=1e-12)), grad)

        return {key: clipped(key) for key in grads}


@dataclass(frozen=True)
class ClipNorm:
    """Scale the whole gradient down to norm `clip.norm` where it is longer (as torch's clip_grad_norm_)."""

    def __call__(self, grads: Tree, carry: Carry, numbers: Numbers, facts: Facts) -> Tree:
        total = torch.sqrt(torch.stack([grad.square().sum() for grad in grads.values()]).sum())
        factor = (numbers["clip.norm"] / (total + 1e-6)).clamp(max=1.0)
        return {key: grad * factor for key, grad in grads.items()}
