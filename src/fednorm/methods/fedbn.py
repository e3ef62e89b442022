"""FedBN: whole batch-norm layers stay on the client."""

from fednorm.method import Part
from fednorm.pieces.changes import keep, policy_claims
from fednorm.registry import register
from fednorm.state import Kind


@register(
    "fedbn",
    paper="Li et al. 2021, ICLR (arXiv 2102.07623)",
    summary="keep batch norms' affine and statistics on each client, average the rest",
)
def fedbn() -> Part:
    return Part(
        keep(affine="local", statistic="local", counter="local"),
        claims=policy_claims("affine", "statistic", "counter"),
        acts_on=frozenset({Kind.AFFINE, Kind.STATISTIC}),
    )
