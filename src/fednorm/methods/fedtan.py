"""FedTAN: in the first local step all clients normalise with the statistics of their joint batch."""

from dataclasses import replace

from fednorm.layers.cohort import cohort_batch_norm
from fednorm.method import Method, Part
from fednorm.pieces.changes import chain, operate, weigh_by
from fednorm.pieces.weights import uniform
from fednorm.registry import register


def _in_lockstep(method: Method) -> Method:
    return method.map_phases(lambda phase: replace(phase, lockstep=1, fresh_after_lockstep=True))


@register(
    "fedtan",
    paper="Wang, Shi, Chang 2023 (arXiv 2301.02982)",
    summary="batch statistics and their gradients over all clients in the first step: 3 exchanges a layer",
)
def fedtan() -> Part:
    change = chain(operate(cohort_batch_norm()), _in_lockstep, weigh_by(uniform))
    return Part(change, claims=frozenset({"choice:the norm layers", "weights"}))
