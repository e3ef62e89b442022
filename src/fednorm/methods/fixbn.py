"""FixBN: batch norms train as usual at first, then their statistics are frozen for the rest of the run."""

from dataclasses import replace

from fednorm.method import Method, Part, Phase
from fednorm.pieces.changes import policy_claims
from fednorm.pieces.switches import after
from fednorm.registry import register
from fednorm.state import Kind, Policy


def freeze(phase: Phase) -> Phase:
    """The same phase with batch statistics held and one server copy of them that is never averaged again."""
    frozen = {Kind.STATISTIC: Policy.FROZEN, Kind.COUNTER: Policy.FROZEN}
    rule = replace(phase.rule, hold=phase.rule.hold | {Kind.STATISTIC})
    return replace(phase, rule=rule, policy={**phase.policy, **frozen})


@register(
    "fixbn",
    paper="Zhong, Chen, Chao 2023 (arXiv 2303.06530)",
    summary="freeze the averaged statistics half-way and train on in inference-mode batch norm",
)
def fixbn(at: float | int = 0.5) -> Part:
    def change(method: Method) -> Method:
        stages = tuple(stage for before in method.stages for stage in (before, tuple(map(freeze, before))))
        return replace(method, stages=stages, switch=after(at))

    return Part(
        change,
        claims=policy_claims("statistic", "counter") | {"switch"},
        acts_on=frozenset({Kind.STATISTIC}),
    )
