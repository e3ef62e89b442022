"""Optimizers on the server: they see weights and affine, never statistics, which they would drive negative."""

from fednorm.core.claims import MERGE_TRAINED
from fednorm.core.merge import Merge
from fednorm.core.method import Part
from fednorm.core.registry import register
from fednorm.core.state import Kind
from fednorm.pieces.changes import merge_by
from fednorm.pieces.merges import ServerAdam, ServerMomentum


def _on_trained(rule: Merge) -> Part:
    return Part(merge_by(rule, Kind.WEIGHT, Kind.AFFINE), claims=frozenset({MERGE_TRAINED}))


@register("fedavgm", paper="Hsu et al. 2019 (arXiv 1909.06335)", summary="momentum on the server's update")
def fedavgm(lr: float = 1.0, momentum: float = 0.9) -> Part:
    return _on_trained(ServerMomentum(lr, momentum))


@register("fedadam", paper="Reddi et al. 2021, ICLR (arXiv 2003.00295)", summary="Adam on the server's update")
def fedadam(lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> Part:
    return _on_trained(ServerAdam(lr, beta1, beta2, tau))
