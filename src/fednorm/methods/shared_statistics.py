"""Batch norms that train on statistics the server keeps moving: FBN, HBN, and FedNN's choice of norm."""

from dataclasses import dataclass, replace
from typing import Literal

from fednorm.core.claims import CONVOLUTIONS, FINISH, MERGE_STATISTICS, NORM_LAYERS, SWITCH
from fednorm.core.method import Method, Part
from fednorm.core.registry import register
from fednorm.core.state import Kind
from fednorm.layers.adaptive_gn import ToAdaptiveGroupNorm
from fednorm.layers.shared_stats import ToFederatedBN, ToHybridBN
from fednorm.layers.ws_conv import StandardiseWeights
from fednorm.methods.decoupled import look_first, then_train
from fednorm.pieces.changes import chain, keep, merge_by, operate, policy_claims
from fednorm.pieces.merges import RecordedMoments
from fednorm.pieces.phases import with_merge

_NORM = frozenset({NORM_LAYERS})


@register(
    "fbn",
    paper="Guerraoui et al. 2024 (arXiv 2405.14670)",
    summary="normalise with shared statistics in training too; the server pools what clients saw and smooths it",
    reconstruction=True,
)
def fbn(ema: float = 0.1, first: float = 1.0) -> Part:
    change = chain(operate(ToFederatedBN()), merge_by(RecordedMoments(ema, first), Kind.STATISTIC))
    return Part(change, claims=_NORM | policy_claims("statistic") | {MERGE_STATISTICS})


@dataclass(frozen=True)
class StatisticsFirst:
    """A look at one batch moves the shared statistics before clients train; before a test, a look at all data does."""

    ema: float
    first: float

    def __call__(self, method: Method) -> Method:
        phase = method.stages[0][-1]
        look = look_first(phase)
        smoothed = replace(with_merge(look, RecordedMoments(self.ema, self.first), Kind.STATISTIC), work="batch")
        # What all data says takes the place of the smoothed statistics.
        query = replace(with_merge(look, RecordedMoments(1.0, 1.0), Kind.STATISTIC), name="query", work="epoch")
        # The mixture needs batch statistics in training, so the shared ones are frozen but the layers are not held.
        return replace(method, stages=((smoothed, then_train(phase)),), query=query)


@register(
    "hbn",
    paper="Chen et al. 2025, ICML (HybridBN)",
    summary="mix shared and batch statistics by a factor each client learns and keeps; two exchanges a round",
    reconstruction=True,
)
def hbn(ema: float = 0.002, first: float | None = None, records: Literal["mixture", "batch"] = "mixture") -> Part:
    statistics_first = StatisticsFirst(ema, ema if first is None else first)
    change = chain(operate(ToHybridBN(records)), keep(extra="local"), statistics_first)
    claims = policy_claims("statistic", "counter", "extra") | {SWITCH, FINISH, MERGE_STATISTICS}
    return Part(change, claims=_NORM | claims)


@register(
    "fednn",
    paper="Kang et al. 2024, Pattern Recognition",
    summary="standardised convolutions and a learned choice of group or batch statistics in every layer",
    reconstruction=True,
)
def fednn(groups: int = 2) -> Part:
    change = operate(StandardiseWeights("qiao"), ToAdaptiveGroupNorm(groups))
    return Part(change, claims=_NORM | {CONVOLUTIONS})
