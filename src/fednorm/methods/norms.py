"""Swaps of batch norm for other norms, and networks initialised to need none."""

from fednorm.core.claims import CONVOLUTIONS, LAST_INPUT, NORM_LAYERS
from fednorm.core.method import Part
from fednorm.core.registry import register
from fednorm.layers.brn import ToBatchRenorm
from fednorm.layers.fixup import FixupRates, ToFixup
from fednorm.layers.norm_free import NormaliseFeatures
from fednorm.pieces.changes import chain, operate, scale_lr
from fednorm.pieces.surgery import ToGroupNorm, ToInstanceNorm, ToLayerNorm, ToPixelLayerNorm

_NORM = frozenset({NORM_LAYERS})
_LAST_INPUT = frozenset({LAST_INPUT})


@register("gn", paper="Wu, He 2018, ECCV", summary="replace BatchNorm by GroupNorm with 2 groups")
def gn(groups: int = 2) -> Part:
    return Part(operate(ToGroupNorm(groups)), claims=_NORM)


@register("ln", paper="Ba et al. 2016 (arXiv 1607.06450)", summary="replace BatchNorm by LayerNorm over C, H, W")
def ln(pixel: bool = False) -> Part:
    return Part(operate(ToPixelLayerNorm() if pixel else ToLayerNorm()), claims=_NORM)


@register("in", paper="Ulyanov et al. 2016 (arXiv 1607.08022)", summary="replace BatchNorm by InstanceNorm")
def instance(affine: bool = True) -> Part:
    return Part(operate(ToInstanceNorm(affine)), claims=_NORM)


@register(
    "brn",
    paper="Ioffe 2017 (arXiv 1702.03275); schedule of Hsieh et al. 2020",
    summary="replace BatchNorm by BatchRenorm, whose training output leans on the running statistics",
)
def brn(r_max: float = 4.0, d_max: float = 6.0, warmup: float = 0.31, momentum: float = 0.01) -> Part:
    surgery = ToBatchRenorm(r_max=r_max, d_max=d_max, warmup=warmup, momentum=momentum)
    return Part(operate(surgery), claims=_NORM)


@register(
    "fixup",
    paper="Zhang, Dauphin, Ma 2019 (arXiv 1901.09321)",
    summary="residual nets without norms, initialised so that every branch starts at zero",
)
def fixup(scalar_lr: float = 0.1) -> Part:
    change = chain(operate(ToFixup()), scale_lr(FixupRates(scalar_lr)))
    return Part(change, claims=_NORM | _LAST_INPUT | {CONVOLUTIONS})


_FN = "Zhang et al. 2024, TMLR; Kim et al. 2023 (FedFN)"


@register("fn", paper=_FN, summary="feature normalization: the last layer sees features of norm sqrt(dim)")
def fn() -> Part:
    return Part(operate(NormaliseFeatures()), claims=_LAST_INPUT)


register("fedfn", paper=_FN, summary="the same as fn, under the name of its other publication")(fn)
