"""SiloBN: running statistics stay on the client, the affine is shared."""

from typing import Literal

from fednorm.core.method import Part
from fednorm.core.registry import register
from fednorm.core.state import Kind
from fednorm.pieces.changes import AverageForNewcomers, chain, keep, policy_claims


@register(
    "silobn",
    paper="Andreux et al. 2020, DCL (arXiv 2008.07424)",
    summary="keep batch norms' running statistics on each client, average weights and affine",
)
def silobn(newcomer: Literal["mean", "pooled"] = "mean") -> Part:
    return Part(
        chain(keep(statistic="local", counter="local"), AverageForNewcomers(newcomer)),
        claims=policy_claims("statistic", "counter"),
        acts_on=frozenset({Kind.STATISTIC}),
    )
