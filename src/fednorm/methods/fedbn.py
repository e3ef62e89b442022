"""FedBN: whole batch-norm layers stay on the client."""

from typing import Literal

from fednorm.method import Part
from fednorm.pieces.changes import average_for_newcomers, chain, keep, policy_claims
from fednorm.registry import register
from fednorm.state import Kind


@register(
    "fedbn",
    paper="Li et al. 2021, ICLR (arXiv 2102.07623)",
    summary="keep batch norms' affine and statistics on each client, average the rest",
)
def fedbn(newcomer: Literal["mean", "pooled"] = "mean") -> Part:
    return Part(
        chain(keep(affine="local", statistic="local", counter="local"), average_for_newcomers(newcomer)),
        claims=policy_claims("affine", "statistic", "counter"),
        acts_on=frozenset({Kind.AFFINE, Kind.STATISTIC}),
    )
