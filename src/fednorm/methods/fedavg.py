"""FedAvg: everything is shared and averaged, running statistics included."""

from fednorm.core.method import Part
from fednorm.core.registry import register
from fednorm.pieces.changes import Nothing


@register(
    "fedavg",
    paper="McMahan et al. 2017, AISTATS",
    summary="average weights, affine and running statistics of all clients by data size",
)
def fedavg() -> Part:
    return Part(Nothing())
