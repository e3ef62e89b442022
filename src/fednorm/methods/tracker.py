"""What FedRevive's server has of its clients beside their weights: tracked statistics, and counts of labels."""

from fednorm.core.method import Part
from fednorm.core.registry import register
from fednorm.core.state import Kind
from fednorm.layers.label_counts import AddLabelCounts
from fednorm.layers.stat_tracker import Track
from fednorm.pieces.changes import chain, keep, operate, policy_claims
from fednorm.pieces.label_counts import CountLabels

_PAPER = "Askin et al. 2025, FedRevive (arXiv 2511.00655)"


@register(
    "tracker",
    paper=_PAPER,
    summary="layers that only track statistics, in BatchNorm's place or behind other norms; the server sees them",
)
def tracker(momentum: float = 0.1) -> Part:
    return Part(chain(operate(Track(momentum)), keep(statistic="reported")), claims=policy_claims("statistic"))


@register(
    "label-counts",
    paper=_PAPER,
    summary="clients tell the server how many examples of each class they trained on; this is not private",
)
def label_counts() -> Part:
    change = chain(operate(AddLabelCounts()), CountLabels(), keep(extra="reported"))
    return Part(change, claims=policy_claims(Kind.EXTRA))
