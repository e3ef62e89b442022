"""SiloBN: running statistics stay on the client, the affine is shared."""

from typing import Literal

from fednorm.core.method import Change, Part
from fednorm.core.registry import register
from fednorm.core.state import Kind
from fednorm.pieces.changes import AverageForNewcomers, NewcomersUnlessTold, chain, keep, policy_claims
from fednorm.pieces.newcomers import Reestimate


@register(
    "silobn",
    paper="Andreux et al. 2020, DCL (arXiv 2008.07424)",
    summary="keep batch norms' running statistics on each client, average weights and affine",
)
def silobn(newcomer: Literal["reestimate", "mean", "pooled"] = "reestimate", report: bool = False) -> Part:
    # An average for newcomers would need the very statistics that no client is to tell.
    newcomers: Change = NewcomersUnlessTold(Reestimate()) if newcomer == "reestimate" else AverageForNewcomers(newcomer)
    return Part(
        chain(keep(statistic="reported" if report else "local", counter="local"), newcomers),
        claims=policy_claims("statistic", "counter"),
        acts_on=frozenset({Kind.STATISTIC}),
    )
