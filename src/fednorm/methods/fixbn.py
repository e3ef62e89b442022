"""FixBN: batch norms train as usual at first, then their statistics are frozen for the rest of the run."""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from fednorm.core.claims import SWITCH
from fednorm.core.method import Facts, Method, Part, Phase
from fednorm.core.registry import register
from fednorm.core.state import Kind, Policy, Tree
from fednorm.errors import ConfigError
from fednorm.pieces.changes import policy_claims
from fednorm.pieces.switches import after, when_settled


def statistics_shift(end: Tree, start: Tree, facts: Facts) -> Tensor:
    """D: the mean over all batch-norm channels of |statistics after local work - statistics received|."""
    keys = [entry.key for entry in facts.entries.values() if entry.kind is Kind.STATISTIC]
    return torch.cat([(end[key] - start[key]).abs().flatten() for key in keys]).mean()


def freeze(phase: Phase, statistics: bool, affine: bool) -> Phase:
    """The same phase with statistics and/or affine held, one server copy of them, never averaged again."""
    kinds = [Kind.STATISTIC, Kind.COUNTER] * statistics + [Kind.AFFINE] * affine
    rule = replace(phase.rule, hold=phase.rule.hold | set(kinds) - {Kind.COUNTER})
    policy = {**phase.policy, **dict.fromkeys(kinds, Policy.FROZEN)}
    # A cohort in lock-step agrees on batch statistics, which nobody uses once they are frozen.
    return replace(phase, rule=rule, policy=policy, measures={}, lockstep=0 if statistics else phase.lockstep)


@register(
    "fixbn",
    paper="Zhong, Chen, Chao 2023 (arXiv 2303.06530)",
    summary="freeze the averaged statistics half-way and train on in inference-mode batch norm",
)
def fixbn(
    at: float | int | Literal["window"] = 0.5,
    statistics: bool = True,
    affine: bool = False,
    window: int = 50,
    tau: float = 1e-4,
    center: Literal["current", "mean"] = "current",
    reduce: Literal["max", "mean"] = "max",
) -> Part:
    if not (statistics or affine):
        raise ConfigError("fixbn with statistics=false and affine=false would freeze nothing; set one of them to true")
    if at != "window" and (window, tau, center, reduce) != (50, 1e-4, "current", "max"):
        raise ConfigError(
            "window, tau, center and reduce belong to the sliding-window rule; give at=window or leave them out"
        )
    switch = after(at) if at != "window" else when_settled("shift", window, tau, center, reduce)

    def change(method: Method) -> Method:
        if at == "window":
            method = method.map_phases(lambda phase: replace(phase, measures={"shift": statistics_shift}))
        stages = (method.stages[0], tuple(freeze(phase, statistics, affine) for phase in method.stages[0]))
        return replace(method, stages=stages, switch=switch)

    claimed = ["statistic", "counter"] * statistics + ["affine"] * affine
    return Part(
        change,
        claims=policy_claims(*claimed) | {SWITCH},
        acts_on=frozenset({Kind.STATISTIC} if statistics else {Kind.AFFINE}),
    )
