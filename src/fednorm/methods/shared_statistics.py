"""Batch norms that train on statistics the server keeps moving: FBN, HBN, and FedNN's choice of norm."""

from dataclasses import replace

from fednorm.core.claims import CONVOLUTIONS, FINISH, MERGE_STATISTICS, NORM_LAYERS, SWITCH
from fednorm.core.method import Method, Part, Phase
from fednorm.core.registry import register
from fednorm.core.state import Kind
from fednorm.layers.adaptive_gn import adaptive_group_norm
from fednorm.layers.shared_stats import federated_batch_norm, hybrid_batch_norm
from fednorm.layers.ws_conv import weight_standardise
from fednorm.methods.decoupled import two_exchanges
from fednorm.pieces.changes import chain, keep, merge_by, operate, policy_claims
from fednorm.pieces.merges import recorded_moments

_NORM = frozenset({NORM_LAYERS})


@register(
    "fbn",
    paper="Guerraoui et al. 2024 (arXiv 2405.14670)",
    summary="normalise with shared statistics in training too; the server pools what clients saw and smooths it",
    reconstruction=True,
)
def fbn(ema: float = 0.1) -> Part:
    change = chain(operate(federated_batch_norm()), merge_by(recorded_moments(ema), Kind.STATISTIC))
    return Part(change, claims=_NORM | policy_claims("statistic") | {MERGE_STATISTICS})


@register(
    "hbn",
    paper="Chen et al. 2025, ICML (HybridBN)",
    summary="mix shared and batch statistics by a factor each client learns and keeps; two exchanges a round",
    reconstruction=True,
)
def hbn(ema: float = 0.002) -> Part:
    def statistics_first(method: Method) -> Method:
        look, train = two_exchanges(method.stages[0][-1])
        # The mixture needs batch statistics in training, so the shared ones are frozen but the layers are not held.
        train = replace(train, rule=method.stages[0][-1].rule)
        look = replace(look, work="batch")
        return replace(method, stages=((_pooling(look, ema), train),), query=_whole(look))

    change = chain(operate(hybrid_batch_norm()), keep(extra="local"), statistics_first)
    claims = policy_claims("statistic", "counter", "extra") | {SWITCH, FINISH, MERGE_STATISTICS}
    return Part(change, claims=_NORM | claims)


def _pooling(phase: Phase, ema: float) -> Phase:
    return replace(phase, merge={**phase.merge, Kind.STATISTIC: recorded_moments(ema)})


def _whole(phase: Phase) -> Phase:
    """The pass over all data before a test, whose statistics take the place of the smoothed ones."""
    return replace(_pooling(phase, 1.0), name="query", work="epoch")


@register(
    "fednn",
    paper="Kang et al. 2024, Pattern Recognition",
    summary="standardised convolutions and a learned choice of group or batch statistics in every layer",
    reconstruction=True,
)
def fednn(groups: int = 2) -> Part:
    change = operate(weight_standardise("qiao"), adaptive_group_norm(groups))
    return Part(change, claims=_NORM | {CONVOLUTIONS})
