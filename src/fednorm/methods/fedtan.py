"""FedTAN: in the first local step all clients normalise with the statistics of their joint batch."""

from dataclasses import replace

from fednorm.core.claims import NORM_LAYERS, WEIGHTS
from fednorm.core.method import Method, Part, Phase
from fednorm.core.registry import register
from fednorm.core.state import Kind, Policy
from fednorm.layers.cohort import cohort_batch_norm
from fednorm.pieces.changes import chain, operate, weigh_by
from fednorm.pieces.weights import uniform


def _in_lockstep(method: Method) -> Method:
    def change(phase: Phase) -> Phase:
        if Kind.STATISTIC in phase.rule.hold:
            return phase  # held statistics are the same everywhere: there is nothing to agree on
        # The authors' code starts a new optimizer after the first step; momentum that is maintained goes on.
        fresh = phase.policy[Kind.OPTIMIZER] is Policy.FRESH
        return replace(phase, lockstep=1, fresh_after_lockstep=fresh)

    return method.map_phases(change)


@register(
    "fedtan",
    paper="Wang, Shi, Chang 2023 (arXiv 2301.02982)",
    summary="batch statistics and their gradients over all clients in the first step: 3 exchanges a layer",
)
def fedtan() -> Part:
    change = chain(operate(cohort_batch_norm()), _in_lockstep, weigh_by(uniform))
    return Part(change, claims=frozenset({NORM_LAYERS, WEIGHTS}))
