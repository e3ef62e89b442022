"""FedBS: clients with a larger loss count more, until the losses agree; then FedProx with equal weights."""

from dataclasses import dataclass, replace
from typing import Literal

from fednorm.core.claims import PROXIMAL_TERM, SWITCH, WEIGHTS
from fednorm.core.method import Method, Part, Phase
from fednorm.core.registry import register
from fednorm.core.report import Uniform
from fednorm.pieces.losses import Proximal
from fednorm.pieces.phases import with_loss, with_weights
from fednorm.pieces.switches import WhenLossesAgree
from fednorm.pieces.weights import ByLoss


@dataclass(frozen=True)
class LossesThenProx:
    """Two stages: clients weigh by a loss until these agree; then they weigh the same and stay near the server."""

    switch: WhenLossesAgree
    mu: float

    def __call__(self, method: Method) -> Method:
        first = tuple(with_weights(phase, ByLoss(self.switch.which)) for phase in method.stages[0])
        second = tuple(map(self._with_prox, method.stages[0]))
        return replace(method, stages=(first, second), switch=self.switch)

    def _with_prox(self, phase: Phase) -> Phase:
        return with_loss(with_weights(phase, Uniform()), Proximal(), {"prox.mu": self.mu})


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
    change = LossesThenProx(WhenLossesAgree(eps, rounds, loss), mu)
    return Part(change, claims=frozenset({SWITCH, WEIGHTS, PROXIMAL_TERM}))
