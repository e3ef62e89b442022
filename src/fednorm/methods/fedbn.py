"""FedBN: whole batch-norm layers stay on the client."""

from typing import Literal

from fednorm.core.method import Part
from fednorm.core.registry import register
from fednorm.core.state import Kind
from fednorm.pieces.changes import AverageForNewcomers, chain, keep, policy_claims


@register(
    "fedbn",
    paper="Li et al. 2021, ICLR (arXiv 2102.07623)",
    summary="keep batch norms' affine and statistics on each client, average the rest",
)
def fedbn(newcomer: Literal["mean", "pooled"] = "mean", report: bool = False) -> Part:
    own = "reported" if report else "local"  # reported: the server sees each client's, averages none and sends none
    return Part(
        chain(keep(affine=own, statistic=own, counter="local"), AverageForNewcomers(newcomer)),
        claims=policy_claims("affine", "statistic", "counter"),
        acts_on=frozenset({Kind.AFFINE, Kind.STATISTIC}),
    )
