"""Decoupled update: first the cohort agrees on statistics, then it trains with these held."""

from dataclasses import dataclass, replace

from fednorm.core.claims import SWITCH
from fednorm.core.method import Method, Part, Phase
from fednorm.core.registry import register
from fednorm.core.state import Kind, Policy
from fednorm.core.step import ObserveStep
from fednorm.pieces.changes import policy_claims
from fednorm.pieces.phases import hold, with_policy

_STATISTICS = {Kind.STATISTIC: Policy.SHARED, Kind.COUNTER: Policy.SHARED, Kind.OPTIMIZER: Policy.FRESH}
_HELD = {Kind.STATISTIC: Policy.FROZEN, Kind.COUNTER: Policy.FROZEN}


def look_first(phase: Phase) -> Phase:
    """Statistics move at fixed weights, on the batches that the phase itself will see."""
    held_back = {kind: each if each is Policy.LOCAL else Policy.FROZEN for kind, each in phase.policy.items()}
    looking = replace(phase, name="statistics", step=ObserveStep(), extras={}, consumes_batches=False)
    return with_policy(looking, {**held_back, **_STATISTICS})


def then_train(phase: Phase) -> Phase:
    """Weights move at the statistics that were agreed on."""
    return with_policy(phase, _HELD)


@dataclass(frozen=True)
class TwoExchanges:
    """Every phase becomes two: first a look for statistics, then training with these held."""

    def __call__(self, method: Method) -> Method:
        pairs = ((look_first(phase), hold(then_train(phase), Kind.STATISTIC)) for phase in method.stages[0])
        return replace(method, stages=(tuple(phase for pair in pairs for phase in pair),))


@register(
    "decoupled",
    paper="Zhong, Chen, Chao 2023, earlier version of FixBN, section 3.3",
    summary="average fresh statistics first, then train with them held: two exchanges a round",
)
def decoupled() -> Part:
    return Part(
        TwoExchanges(),
        claims=policy_claims("statistic", "counter") | {SWITCH},
        acts_on=frozenset({Kind.STATISTIC}),
    )
