"""Maintained momentum: the local optimizer's buffers outlive the round (FixBN's section on momentum)."""

from dataclasses import dataclass, replace

from fednorm.core.method import Part, Phase
from fednorm.core.registry import register
from fednorm.core.state import Kind, Policy
from fednorm.pieces.changes import PhaseChange, policy_claims
from fednorm.pieces.phases import with_policy

_PAPER = "Zhong, Chen, Chao 2023 (arXiv 2303.06530)"


@dataclass(frozen=True)
class MaintainMomentum(PhaseChange):
    """The optimizer's buffers outlive the round, under this policy."""

    policy: Policy

    def changed(self, phase: Phase) -> Phase:
        if not phase.consumes_batches:
            return phase  # an exchange that only looks has no use for the buffers and must not pay for them
        return replace(with_policy(phase, {Kind.OPTIMIZER: self.policy}), fresh_after_lockstep=False)


def _maintained(policy: Policy) -> Part:
    return Part(MaintainMomentum(policy), claims=policy_claims("optimizer"))


@register(
    "local-momentum",
    paper=_PAPER,
    summary="each client keeps its momentum buffers from round to round",
)
def local_momentum() -> Part:
    return _maintained(Policy.LOCAL)


@register(
    "global-momentum",
    paper=_PAPER,
    summary="momentum buffers are averaged and sent like the model, so clients need no state",
)
def global_momentum() -> Part:
    return _maintained(Policy.SHARED)
