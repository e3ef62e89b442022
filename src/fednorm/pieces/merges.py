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
    total = wide(tensors[0]) * weights[0]
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        total.add_(wide(tensor), alpha=weight)
    return total


def wide(tensor: Tensor) -> Tensor:
    """A tensor in float64, on the host where the device has no such type."""
    return tensor.to("cpu", torch.float64) if tensor.device.type == "mps" else tensor.to(torch.float64)


def mean(old: Tree, updates: Sequence[Tree], weights: Sequence[float], memory: Tree) -> tuple[Tree, Tree]:
    """Element-wise weighted mean: x = sum_k p_k x_k."""
    merged = {key: weighted_sum([update[key] for update in updates], weights) for key in old}
    return {key: value.to(old[key]) for key, value in merged.items()}, memory


def maximum(old: Tree, updates: Sequence[Tree], weights: Sequence[float], memory: Tree) -> tuple[Tree, Tree]:
    """Element-wise maximum, for counters: no order, no weights, no change of type."""
    return {key: torch.stack([update[key] for update in updates]).amax(0) for key in old}, memory


def pooled(old: Tree, updates: Sequence[Tree], weights: Sequence[float], memory: Tree) -> tuple[Tree, Tree]:
    """Mean and variance of the clients' mixture, by the law of total variance.

    mu = sum p_k mu_k, var = sum p_k (var_k + (mu_k - mu)^2). The element-wise mean drops the second part, which is
    what differs between clients. A layer that keeps a standard deviation gets the root of the pooled square.
    """
    merged, _ = mean(old, updates, weights, {})
    merged |= pooled_moments(old, updates, weights, "running_mean", "running_var")
    if "running_std" in old:
        squares = [{**each, "running_var": wide(each["running_std"]).square()} for each in updates]
        var = pooled_moments(
            {**old, "running_var": old["running_std"]}, squares, weights, "running_mean", "running_var"
        )
        merged["running_std"] = var["running_var"].sqrt()
    return merged, memory


def pooled_moments(old: Tree, updates: Sequence[Tree], weights: Sequence[float], mean_part: str, var_part: str) -> Tree:
    """The pooled mean and variance of two parts of a layer; empty where the layer has none."""
    if mean_part not in old or var_part not in old:
        return {}
    centre = weighted_sum([each[mean_part] for each in updates], weights)
    spread = [wide(each[var_part]) + (wide(each[mean_part]) - centre).square() for each in updates]
    return {mean_part: centre.to(old[mean_part]), var_part: weighted_sum(spread, weights).to(old[var_part])}


def recorded_moments(ema: float, first: float = 1.0) -> Merge:
    """Fold the moments clients recorded of their batches, pooled over clients, into the shared statistics.

    running <- (1 - ema) running + ema * pooled(batch moments), with `first` in place of `ema` at the first merge,
    since the initial (0, 1) is no estimate. The recorded moments start anew.
    """

    def merge(old: Tree, updates: Sequence[Tree], weights: Sequence[float], memory: Tree) -> tuple[Tree, Tree]:
        merged, _ = mean(old, updates, weights, {})
        fresh = pooled_moments(old, updates, weights, "batch_mean", "batch_var")
        rate = ema if memory else first
        for running, recorded in (("running_mean", "batch_mean"), ("running_var", "batch_var")):
            if recorded in fresh:
                merged[running] = (1 - rate) * old[running] + rate * fresh[recorded]
        merged |= {part: torch.zeros_like(old[part]) for part in _RECORDED if part in old}
        return merged, {"merges": torch.ones(1)}

    return merge


_RECORDED = ("batch_mean", "batch_var", "batch_count")


def server_momentum(lr: float, momentum: float) -> Merge:
    """FedAvgM: v <- momentum v + (x - mean), x <- x - lr v (Hsu et al. 2019)."""

    def merge(old: Tree, updates: Sequence[Tree], weights: Sequence[float], memory: Tree) -> tuple[Tree, Tree]:
        new, velocity = {}, {}
        for part, value in old.items():
            step = wide(value) - weighted_sum([each[part] for each in updates], weights)
            velocity[part] = momentum * memory.get(part, torch.zeros_like(step)) + step
            new[part] = (wide(value) - lr * velocity[part]).to(value)
        return new, velocity

    return merge


def server_adam(lr: float, beta1: float, beta2: float, tau: float) -> Merge:
    """FedAdam: Adam on the server with mean - x as the direction (Reddi et al. 2021, Algorithm 2)."""

    def merge(old: Tree, updates: Sequence[Tree], weights: Sequence[float], memory: Tree) -> tuple[Tree, Tree]:
        new, remembered = {}, {}
        for part, value in old.items():
            delta = weighted_sum([each[part] for each in updates], weights) - wide(value)
            zero = torch.zeros_like(delta)
            first = beta1 * memory.get(f"{part}.m", zero) + (1 - beta1) * delta
            second = beta2 * memory.get(f"{part}.v", zero + tau**2) + (1 - beta2) * delta.square()
            new[part] = (wide(value) + lr * first / (second.sqrt() + tau)).to(value)
            remembered |= {f"{part}.m": first, f"{part}.v": second}
        return new, remembered

    return merge
