"""How the server joins the clients' tensors: pure functions of stacks with a leading client axis, float64 inside.

Callers stack the clients in ascending id, so the order of arrival cannot change a bit. Nothing here asks the device for
a value, so a merge can be captured in a graph and mapped over several runs at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fednorm.core.reductions import largest, weighted_sum, wide
from fednorm.core.state import Tree

Merge = Callable[[Tree, Tree, Tensor, Tree], tuple[Tree, Tree]]
"""(server's old tensors, the clients' with a leading client axis, weights of the clients, memory) -> (new, new memory).

The trees hold the entries of one kind by part (`weight`, `running_var`, ...), so that a rule can treat a mean and a
variance together. A rule works element by element: element i of its result depends on elements i of the parts and of
the memory, never on their neighbours or their shape. So the server hands it many layers with the same parts as one,
each part flattened and laid end to end. Memory of the elements of a part is named after it, `weight` or `weight.m`;
under any other name it is a number common to the layers. A rule may ask whether there is memory, not what it holds.
Over clients it reduces by `reductions` alone, since a stack may hold only those of one process.
"""


def mean(old: Tree, clients: Tree, weights: Tensor, memory: Tree) -> tuple[Tree, Tree]:
    """Element-wise weighted mean: x = sum_k p_k x_k."""
    return {part: weighted_sum(clients[part], weights).to(value) for part, value in old.items()}, memory


ALIKE: dict[Merge, Callable[[Tensor, Tensor], Tensor]] = {mean: weighted_sum}
"""Rules that do the same to every element, whatever its part, and remember nothing, as functions of (stack, weights).

So the server can merge all their entries at once, across layers and kinds.
"""


def maximum(old: Tree, clients: Tree, weights: Tensor, memory: Tree) -> tuple[Tree, Tree]:
    """Element-wise maximum, for counters: no order, no weights, no change of type."""
    return {part: largest(clients[part]) for part in old}, memory


def pooled(old: Tree, clients: Tree, weights: Tensor, memory: Tree) -> tuple[Tree, Tree]:
    """Mean and variance of the clients' mixture, by the law of total variance.

    mu = sum p_k mu_k, var = sum p_k (var_k + (mu_k - mu)^2). The element-wise mean drops the second part, which is
    what differs between clients. A layer that keeps a standard deviation gets the root of the pooled square.
    """
    merged, _ = mean(old, clients, weights, {})
    merged |= pooled_moments(old, clients, weights, "running_mean", "running_var")
    if "running_std" in old:
        squares = {**clients, "running_var": wide(clients["running_std"]).square()}
        var = pooled_moments(
            {**old, "running_var": old["running_std"]}, squares, weights, "running_mean", "running_var"
        )
        merged["running_std"] = var["running_var"].sqrt()
    return merged, memory


def pooled_moments(old: Tree, clients: Tree, weights: Tensor, mean_part: str, var_part: str) -> Tree:
    """The pooled mean and variance of two parts of a layer; empty where the layer has none."""
    if mean_part not in old or var_part not in old:
        return {}
    centre = weighted_sum(clients[mean_part], weights)
    spread = wide(clients[var_part]) + (wide(clients[mean_part]) - centre).square()
    return {mean_part: centre.to(old[mean_part]), var_part: weighted_sum(spread, weights).to(old[var_part])}


def recorded_moments(ema: float, first: float = 1.0) -> Merge:
    """Fold the moments clients recorded of their batches, pooled over clients, into the shared statistics.

    running <- (1 - ema) running + ema * pooled(batch moments), with `first` in place of `ema` at the first merge,
    since the initial (0, 1) is no estimate. The recorded moments start anew.
    """

    def merge(old: Tree, clients: Tree, weights: Tensor, memory: Tree) -> tuple[Tree, Tree]:
        merged, _ = mean(old, clients, weights, {})
        fresh = pooled_moments(old, clients, weights, "batch_mean", "batch_var")
        rate = ema if memory else first
        for running, recorded in (("running_mean", "batch_mean"), ("running_var", "batch_var")):
            if recorded in fresh:
                merged[running] = (1 - rate) * old[running] + rate * fresh[recorded]
        merged |= {part: torch.zeros_like(old[part]) for part in _RECORDED if part in old}
        return merged, {"merges": torch.ones(1, device=weights.device)}

    return merge


_RECORDED = ("batch_mean", "batch_var", "batch_count")


def server_momentum(lr: float, momentum: float) -> Merge:
    """FedAvgM: v <- momentum v + (x - mean), x <- x - lr v (Hsu et al. 2019)."""

    def merge(old: Tree, clients: Tree, weights: Tensor, memory: Tree) -> tuple[Tree, Tree]:
        new, velocity = {}, {}
        for part, value in old.items():
            step = wide(value) - weighted_sum(clients[part], weights)
            velocity[part] = momentum * memory.get(part, torch.zeros_like(step)) + step
            new[part] = (wide(value) - lr * velocity[part]).to(value)
        return new, velocity

    return merge


def server_adam(lr: float, beta1: float, beta2: float, tau: float) -> Merge:
    """FedAdam: Adam on the server with mean - x as the direction (Reddi et al. 2021, Algorithm 2)."""

    def merge(old: Tree, clients: Tree, weights: Tensor, memory: Tree) -> tuple[Tree, Tree]:
        new, remembered = {}, {}
        for part, value in old.items():
            delta = weighted_sum(clients[part], weights) - wide(value)
            zero = torch.zeros_like(delta)
            first = beta1 * memory.get(f"{part}.m", zero) + (1 - beta1) * delta
            second = beta2 * memory.get(f"{part}.v", zero + tau**2) + (1 - beta2) * delta.square()
            new[part] = (wide(value) + lr * first / (second.sqrt() + tau)).to(value)
            remembered |= {f"{part}.m": first, f"{part}.v": second}
        return new, remembered

    return merge
