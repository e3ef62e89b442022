"""FedAsync: every update makes a version, in which the client's model and the server's are mixed."""

from typing import Literal

from fednorm.core.strategy import Constant, Discount, Strategy
from fednorm.core.strategy_registry import register_strategy
from fednorm.errors import ConfigError
from fednorm.pieces.discounts import Hinge, Polynomial


@register_strategy(
    "fedasync",
    paper="Xie, Koyejo, Gupta 2019 (arXiv 1903.03934)",
    summary="mix every client's model into the server's, less the staler it is; its local term is fedprox",
)
def fedasync(
    lr: float = 0.6,
    staleness: Literal["polynomial", "hinge", "constant"] = "polynomial",
    a: float | None = None,
    b: float = 4.0,
    statistics: Literal["values", "discounted", "fresh"] = "discounted",
    fresh: int = 0,
) -> Strategy:
    if lr > 1:
        raise ConfigError(f"lr={lr} would mix in more than the client's model; give a number above 0, up to 1")
    discounts: dict[str, Discount] = {
        "polynomial": Polynomial(0.5 if a is None else a),
        "hinge": Hinge(10.0 if a is None else a, b),
        "constant": Constant(),
    }
    return Strategy(
        rate=lr,
        discount=discounts[staleness],
        form="models",
        statistics=statistics,
        fresh=fresh,
    )
