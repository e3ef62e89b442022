"""Rounds on the clock: whoever was asked is waited for, so a version takes as long as the slowest client."""

from typing import Literal

from fednorm.core.strategy import Strategy
from fednorm.core.strategy_registry import register_strategy


@register_strategy(
    "sync",
    paper="McMahan et al. 2017, AISTATS",
    summary="rounds on the same clock: all that are under way make a version, and nobody is sent anything before",
)
def sync(lr: float = 1.0, weights: Literal["method", "uniform"] = "method") -> Strategy:
    return Strategy(rate=lr, weights=weights, barrier=True)
