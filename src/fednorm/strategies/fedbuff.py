"""FedBuff: some updates are buffered, then they make a version together."""

from typing import Literal

from fednorm.core.strategy import Constant, Strategy
from fednorm.core.strategy_registry import register_strategy
from fednorm.pieces.discounts import Polynomial


@register_strategy(
    "fedbuff",
    paper="Nguyen et al. 2022, AISTATS (arXiv 2106.06639)",
    summary="b updates make a version; a stale one counts 1/sqrt(1 + staleness), the sum is divided by b",
)
def fedbuff(
    b: int = 10,
    lr: float = 1.0,
    staleness: Literal["polynomial", "none"] = "polynomial",
    a: float = 0.5,
    weights: Literal["uniform", "method"] = "uniform",
    statistics: Literal["values", "discounted", "fresh"] = "values",
    fresh: int = 0,
) -> Strategy:
    discount = Polynomial(a) if staleness == "polynomial" else Constant()
    return Strategy(buffer=b, rate=lr, discount=discount, weights=weights, statistics=statistics, fresh=fresh)
