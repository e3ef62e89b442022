"""FedTAN: in the first local step all clients normalise with the statistics of their joint batch."""

from dataclasses import dataclass, replace

from fednorm.core.claims import NORM_LAYERS, WEIGHTS
from fednorm.core.method import Part, Phase
from fednorm.core.registry import register
from fednorm.core.report import Uniform
from fednorm.core.state import Kind, Policy
from fednorm.layers.cohort import ToCohortBN
from fednorm.pieces.changes import PhaseChange, chain, operate, weigh_by


@dataclass(frozen=True)
class StepTogether(PhaseChange):
    """The cohort takes its first step together, where statistics are not held."""

    def changed(self, phase: Phase) -> Phase:
        if Kind.STATISTIC in phase.rule.hold:
            return phase  # held statistics are the same everywhere: there is nothing to agree on
        # The authors' code starts a new optimizer after the first step; momentum that is maintained goes on.
        fresh = phase.policy[Kind.OPTIMIZER] is Policy.FRESH
        return replace(phase, lockstep=1, fresh_after_lockstep=fresh)


@register(
    "fedtan",
    paper="Wang, Shi, Chang 2023 (arXiv 2301.02982)",
    summary="batch statistics and their gradients over all clients in the first step: 3 exchanges a layer",
)
def fedtan() -> Part:
    change = chain(operate(ToCohortBN()), StepTogether(), weigh_by(Uniform()))
    return Part(change, claims=frozenset({NORM_LAYERS, WEIGHTS}))
