"""FedBS: clients with a larger loss count more, until the losses agree; then FedProx with equal weights."""

from dataclasses import replace
from typing import Literal

from fednorm.core.claims import PROXIMAL_TERM, SWITCH, WEIGHTS
from fednorm.core.method import Method, Part, Phase
from fednorm.core.registry import register
from fednorm.core.state import Kind
from fednorm.pieces.losses import proximal
from fednorm.pieces.switches import when_losses_agree
from fednorm.pieces.weights import Weigh, by_loss, uniform


@register(
    "fedbs",
    paper="Idrissi et al. 2021, ICTAI",
    summary="weigh clients by their training loss; once losses agree, equal weights and FedProx",
)
def fedbs(
    eps: float = 0.1,
    rounds: int = 5,
    mu: float = 0.01,
    loss: Literal["last_epoch", "last_batch", "all"] = "last_epoch",
) -> Part:
    def weighed(phase: Phase, weigh: Weigh) -> Phase:
        return replace(phase, weigh=dict.fromkeys(Kind, weigh))

    def with_prox(phase: Phase) -> Phase:
        numbers = {**phase.rule.numbers, "prox.mu": mu}
        return replace(phase, rule=replace(phase.rule, losses=(*phase.rule.losses, proximal), numbers=numbers))

    def change(method: Method) -> Method:
        first = tuple(weighed(phase, by_loss(loss)) for phase in method.stages[0])
        second = tuple(with_prox(weighed(phase, uniform)) for phase in method.stages[0])
        return replace(method, stages=(first, second), switch=when_losses_agree(eps, rounds, loss))

    return Part(change, claims=frozenset({SWITCH, WEIGHTS, PROXIMAL_TERM}))
