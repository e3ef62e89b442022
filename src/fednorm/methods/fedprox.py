"""FedProx: a penalty keeps each client near the model it was sent."""

from fednorm.method import Part
from fednorm.pieces.changes import add_loss
from fednorm.pieces.losses import proximal
from fednorm.registry import register


@register(
    "fedprox",
    paper="Li et al. 2020, MLSys",
    summary="add (mu/2) ||w - w_t||^2 to every client's loss",
)
def fedprox(mu: float = 0.01) -> Part:
    return Part(add_loss(proximal, **{"prox.mu": mu}), claims=frozenset({"loss:the proximal term"}))
