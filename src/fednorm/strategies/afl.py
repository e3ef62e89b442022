"""AFL-DW: every update makes a version, and stale ones count little: FedRevive without what it revives them by."""

from typing import Literal

from fednorm.core.strategy import Strategy
from fednorm.core.strategy_registry import register_strategy
from fednorm.pieces.discounts import Cosine


@register_strategy(
    "afl-dw",
    paper="baseline of Askin et al. 2025 (arXiv 2511.00655)",
    summary="every update makes a version and counts (1 + cos(pi staleness / 2 s_max)) / 2",
)
def afl_dw(
    b: int = 1,
    lr: float = 0.1,
    s_max: float = 75.0,
    statistics: Literal["values", "discounted", "fresh"] = "values",
    fresh: int = 0,
) -> Strategy:
    return Strategy(buffer=b, rate=lr, discount=Cosine(s_max), statistics=statistics, fresh=fresh)
