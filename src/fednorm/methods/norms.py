"""Swaps of batch norm for norms that do not look at the batch."""

from fednorm.method import Part
from fednorm.pieces.changes import operate
from fednorm.pieces.surgery import group_norm, instance_norm, layer_norm
from fednorm.registry import register

_NORM = frozenset({"choice:the norm layers"})


@register("gn", paper="Wu, He 2018, ECCV", summary="replace BatchNorm by GroupNorm with 2 groups")
def gn(groups: int = 2) -> Part:
    return Part(operate("gn", group_norm(groups)), claims=_NORM)


@register("ln", paper="Ba et al. 2016 (arXiv 1607.06450)", summary="replace BatchNorm by LayerNorm over C, H, W")
def ln() -> Part:
    return Part(operate("ln", layer_norm()), claims=_NORM)


@register("in", paper="Ulyanov et al. 2016 (arXiv 1607.08022)", summary="replace BatchNorm by InstanceNorm")
def instance() -> Part:
    return Part(operate("in", instance_norm()), claims=_NORM)
