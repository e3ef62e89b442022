"""Merges that treat the parts of a layer together, or remember something from round to round."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fednorm.core.merge import Mean
from fednorm.core.reductions import weighted_sum, wide
from fednorm.core.state import Tree
from fednorm.errors import ConfigError


@dataclass(frozen=True)
class Pooled:
    """Mean and variance of the clients' mixture, by the law of total variance.

    mu = sum p_k mu_k, var = sum p_k (var_k + (mu_k - mu)^2). The element-wise mean drops the second part, which is
    what differs between clients. A layer that keeps a standard deviation gets the root of the pooled square.
    """

    def __call__(self, old: Tree, clients: Tree, weights: Tensor, memory: Tree) -> tuple[Tree, Tree]:
        merged, _ = Mean()(old, clients, weights, {})
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


@dataclass(frozen=True)
class RecordedMoments:
    """Fold the moments clients recorded of their batches, pooled over clients, into the shared statistics.

    running <- (1 - ema) running + ema * pooled(batch moments), with `first` in place of `ema` at the first merge: 1
    where the initial (0, 1) is no estimate to keep. The recorded moments start anew.
    """

    ema: float
    first: float

    def __post_init__(self) -> None:
        for name, rate in (("ema", self.ema), ("first", self.first)):
            if not 0 < rate <= 1:
                raise ConfigError(f"{name}={rate} is no rate of an average; give a number above 0, up to 1")

    def __call__(self, old: Tree, clients: Tree, weights: Tensor, memory: Tree) -> tuple[Tree, Tree]:
        merged, _ = Mean()(old, clients, weights, {})
        fresh = pooled_moments(old, clients, weights, "batch_mean", "batch_var")
        rate = self.ema if memory else self.first
        for running, recorded in (("running_mean", "batch_mean"), ("running_var", "batch_var")):
            if recorded in fresh:
                merged[running] = (1 - rate) * old[running] + rate * fresh[recorded]
        merged |= {part: torch.zeros_like(old[part]) for part in _RECORDED if part in old}
        return merged, {"merges": torch.ones(1, device=weights.device)}


_RECORDED = ("batch_mean", "batch_var", "batch_count")


@dataclass(frozen=True)
class ServerMomentum:
    """FedAvgM: v <- momentum v + (x - mean), x <- x - lr v (Hsu et al. 2019)."""

    lr: float
    momentum: float

    def __call__(self, old: Tree, clients: Tree, weights: Tensor, memory: Tree) -> tuple[Tree, Tree]:
        new, velocity = {}, {}
        for part, value in old.items():
            step = wide(value) - weighted_sum(clients[part], weights)
            velocity[part] = self.momentum * memory.get(part, torch.zeros_like(step)) + step
            new[part] = (wide(value) - self.lr * velocity[part]).to(value)
        return new, velocity


@dataclass(frozen=True)
class ServerAdam:
    """FedAdam: Adam on the server with mean - x as the direction (Reddi et al. 2021, Algorithm 2)."""

    lr: float
    beta1: float
    beta2: float
    tau: float

    def __call__(self, old: Tree, clients: Tree, weights: Tensor, memory: Tree) -> tuple[Tree, Tree]:
        new, remembered = {}, {}
        for part, value in old.items():
            delta = weighted_sum(clients[part], weights) - wide(value)
            zero = torch.zeros_like(delta)
            first = self.beta1 * memory.get(f"{part}.m", zero) + (1 - self.beta1) * delta
            second = self.beta2 * memory.get(f"{part}.v", zero + self.tau**2) + (1 - self.beta2) * delta.square()
            new[part] = (wide(value) + self.lr * first / (second.sqrt() + self.tau)).to(value)
            remembered |= {f"{part}.m": first, f"{part}.v": second}
        return new, remembered
