"""Parts that decide how statistics are merged, taken anew after training, or found for a client never seen."""

from typing import Literal

from fednorm.core.claims import FINISH, MERGE_STATISTICS, NEWCOMERS, NORM_LAYERS, WEIGHTS
from fednorm.core.method import Part, Phase
from fednorm.core.newcomer import Newcomer
from fednorm.core.registry import register
from fednorm.core.report import BySize, Uniform, Weigh
from fednorm.core.state import Kind, Policy
from fednorm.layers.static_bn import ToStaticBN
from fednorm.pieces.changes import (
    Finish,
    Query,
    TreatNewcomers,
    chain,
    keep,
    merge_by,
    operate,
    policy_claims,
    weigh_by,
)
from fednorm.pieces.merges import Pooled
from fednorm.pieces.moments import TakeMoments
from fednorm.pieces.newcomers import Reestimate, Track
from fednorm.pieces.phases import with_merge
from fednorm.pieces.weights import ByDivergence

_MERGE = frozenset({MERGE_STATISTICS})
_QUERY = dict.fromkeys(Kind, Policy.FROZEN) | {
    Kind.STATISTIC: Policy.SHARED,
    Kind.COUNTER: Policy.SHARED,
    Kind.OPTIMIZER: Policy.FRESH,
}


@register("pooled", paper="law of total variance", summary="merge variances with the part that differs between clients")
def pooled() -> Part:
    return Part(merge_by(Pooled(), Kind.STATISTIC), claims=_MERGE, acts_on=frozenset({Kind.STATISTIC}))


@register(
    "feddna",
    paper="Duan, Li, Lu 2021, ECML-PKDD",
    summary="merge statistics with their own weights, smaller for clients far from the pool",
    reconstruction=True,
)
def feddna(q: Literal["divergence", "size", "uniform"] = "divergence", tau: float = 1.0) -> Part:
    weights: dict[str, Weigh] = {"divergence": ByDivergence(tau), "size": BySize(), "uniform": Uniform()}
    change = weigh_by(weights[q], Kind.STATISTIC)
    if q == "divergence":
        change = chain(change, merge_by(Pooled(), Kind.STATISTIC))
    return Part(change, claims=_MERGE | {WEIGHTS}, acts_on=frozenset({Kind.STATISTIC}))


def query(mode: Literal["ema", "cumulative", "pooled"]) -> Phase:
    """A pass over the training data that takes the statistics anew: pooled by clients, or over all data as one."""
    phase = Phase(
        name="statistics",
        step=TakeMoments(mode),
        policy=_QUERY,
        work="epoch",
        union=mode != "pooled",
        consumes_batches=False,
    )
    return with_merge(phase, Pooled(), Kind.STATISTIC)


@register(
    "posthoc",
    paper="Zhong, Chen, Chao 2023, earlier version of FixBN, section 3.4",
    summary="after training, take the statistics anew from the training data",
)
def posthoc(mode: Literal["federated", "ema", "cumulative"] = "federated") -> Part:
    phase = query("pooled" if mode == "federated" else mode)
    return Part(Finish(phase), claims=frozenset({FINISH}), acts_on=frozenset({Kind.STATISTIC}))


@register(
    "sbn",
    paper="Diao, Ding, Tarokh 2021, ICLR (HeteroFL, arXiv 2010.01264)",
    summary="static batch norm: no running statistics in training, one query fills them at the end",
)
def sbn(query_mode: Literal["pooled", "cumulative"] = "pooled") -> Part:
    change = chain(
        operate(ToStaticBN()),
        keep(statistic="dropped", counter="dropped"),
        weigh_by(Uniform()),
        Query(query(query_mode)),
    )
    return Part(change, claims=policy_claims("statistic", "counter") | {NORM_LAYERS, WEIGHTS, FINISH})


@register(
    "adabn",
    paper="Li et al. 2018; SiloBN's transfer (Andreux et al. 2020)",
    summary="clients never seen before take their statistics from their own unlabelled data",
)
def adabn() -> Part:
    return _newcomer(Reestimate())


@register(
    "tsmobn",
    paper="Jiang et al. 2021 (arXiv 2110.09974)",
    summary="clients never seen before move their statistics with each unlabelled test batch",
    reconstruction=True,
)
def tsmobn(momentum: float = 0.1) -> Part:
    return _newcomer(Track(momentum))


def _newcomer(rule: Newcomer) -> Part:
    return Part(TreatNewcomers(rule), claims=frozenset({NEWCOMERS}), acts_on=frozenset({Kind.STATISTIC}))
