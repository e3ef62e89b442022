"""FedProx: a penalty keeps each client near the model it was sent."""

from typing import Literal

from fednorm.core.claims import PROXIMAL_TERM
from fednorm.core.method import Part
from fednorm.core.registry import register
from fednorm.errors import ConfigError
from fednorm.pieces.changes import add_loss
from fednorm.pieces.losses import Distance, Proximal


@register(
    "fedprox",
    paper="Li et al. 2020, MLSys",
    summary="add (mu/2) ||w - w_t||^2 to every client's loss",
)
def fedprox(mu: float = 0.01, norm: Literal["squared", "l2"] = "squared") -> Part:
    if not mu >= 0:
        raise ConfigError(f"mu={mu} would push clients away from the server's model; give 0 or more")
    penalty = Proximal() if norm == "squared" else Distance()
    return Part(add_loss(penalty, **{"prox.mu": mu}), claims=frozenset({PROXIMAL_TERM}))
