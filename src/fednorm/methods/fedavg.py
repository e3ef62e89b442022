"""FedAvg: everything is shared and averaged, running statistics included."""

from fednorm.method import Part
from fednorm.pieces.changes import nothing
from fednorm.registry import register


@register(
    "fedavg",
    paper="McMahan et al. 2017, AISTATS",
    summary="average weights, affine and running statistics of all clients by data size",
)
def fedavg() -> Part:
    return Part(nothing)
