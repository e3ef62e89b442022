"""FixBN: batch norms train as usual at first, then their statistics are frozen for the rest of the run."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from fednorm.core.claims import SWITCH
from fednorm.core.frozen import FrozenDict
from fednorm.core.method import Measure, Method, Part, Phase, Switch
from fednorm.core.registry import register
from fednorm.core.state import Kind, Policy
from fednorm.errors import ConfigError
from fednorm.pieces.changes import policy_claims
from fednorm.pieces.measures import StatisticsShift
from fednorm.pieces.phases import hold, with_policy
from fednorm.pieces.switches import After, WhenSettled


@dataclass(frozen=True)
class FreezeLater:
    """Two stages: as usual until the switch, then with statistics, affine or both held and not averaged."""

    switch: Switch
    statistics: bool
    affine: bool
    measures: Mapping[str, Measure] = FrozenDict()
    """What clients report in the first stage for the switch to decide by."""

    def __call__(self, method: Method) -> Method:
        plain = method.stages[0]
        first = tuple(replace(phase, measures={**phase.measures, **self.measures}) for phase in plain)
        return replace(method, stages=(first, tuple(map(self._frozen, plain))), switch=self.switch)

    def _frozen(self, phase: Phase) -> Phase:
        kinds = [Kind.STATISTIC, Kind.COUNTER] * self.statistics + [Kind.AFFINE] * self.affine
        held = hold(phase, *(kind for kind in kinds if kind is not Kind.COUNTER))
        frozen = with_policy(held, dict.fromkeys(kinds, Policy.FROZEN))
        # A cohort in lock-step agrees on batch statistics, which nobody uses once they are frozen.
        return replace(frozen, measures={}, lockstep=0 if self.statistics else phase.lockstep)


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
    if at == "window":
        switch, measures = WhenSettled("shift", window, tau, center, reduce), FrozenDict(shift=StatisticsShift())
    else:
        switch, measures = After(at), FrozenDict()
    claimed = ["statistic", "counter"] * statistics + ["affine"] * affine
    return Part(
        FreezeLater(switch, statistics, affine, measures),
        claims=policy_claims(*claimed) | {SWITCH},
        acts_on=frozenset({Kind.STATISTIC} if statistics else {Kind.AFFINE}),
    )
