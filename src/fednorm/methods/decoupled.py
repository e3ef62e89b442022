"""Decoupled update: first the cohort agrees on statistics, then it trains with these held."""

from dataclasses import replace

from fednorm.core.claims import SWITCH
from fednorm.core.method import Method, Part, Phase
from fednorm.core.registry import register
from fednorm.core.state import Kind, Policy
from fednorm.core.step import ObserveStep
from fednorm.pieces.changes import policy_claims


def two_exchanges(phase: Phase) -> tuple[Phase, Phase]:
    """(a) statistics move at fixed weights, on the batches (b) will see; (b) weights move at fixed statistics."""
    held_back = {kind: each if each is Policy.LOCAL else Policy.FROZEN for kind, each in phase.policy.items()}
    statistics = {**held_back, Kind.STATISTIC: Policy.SHARED, Kind.COUNTER: Policy.SHARED, Kind.OPTIMIZER: Policy.FRESH}
    held = {**phase.policy, Kind.STATISTIC: Policy.FROZEN, Kind.COUNTER: Policy.FROZEN}
    rule = replace(phase.rule, hold=phase.rule.hold | {Kind.STATISTIC})
    return (
        replace(phase, name="statistics", step=ObserveStep(), policy=statistics, consumes_batches=False),
        replace(phase, policy=held, rule=rule),
    )


@register(
    "decoupled",
    paper="Zhong, Chen, Chao 2023, earlier version of FixBN, section 3.3",
    summary="average fresh statistics first, then train with them held: two exchanges a round",
)
def decoupled() -> Part:
    def change(method: Method) -> Method:
        return replace(method, stages=(tuple(each for phase in method.stages[0] for each in two_exchanges(phase)),))

    return Part(
        change,
        claims=policy_claims("statistic", "counter") | {SWITCH},
        acts_on=frozenset({Kind.STATISTIC}),
    )
