"""Maintained momentum: the local optimizer's buffers outlive the round (FixBN's section on momentum)."""

from fednorm.method import Part
from fednorm.pieces.changes import keep, policy_claims
from fednorm.registry import register

_PAPER = "Zhong, Chen, Chao 2023 (arXiv 2303.06530)"


@register(
    "local-momentum",
    paper=_PAPER,
    summary="each client keeps its momentum buffers from round to round",
)
def local_momentum() -> Part:
    return Part(keep(optimizer="local"), claims=policy_claims("optimizer"))


@register(
    "global-momentum",
    paper=_PAPER,
    summary="momentum buffers are averaged and sent like the model, so clients need no state",
)
def global_momentum() -> Part:
    return Part(keep(optimizer="shared"), claims=policy_claims("optimizer"))
