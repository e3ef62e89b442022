"""FedWon and its pieces: no normalization layers, standardised weights, clipped gradients."""

from typing import Literal

from fednorm.core.claims import CLIPPING, CONVOLUTIONS, NORM_LAYERS
from fednorm.core.method import Change, Part
from fednorm.core.registry import register
from fednorm.core.surgery import Surgery
from fednorm.layers.norm_free import DropNorms, ScaleResiduals
from fednorm.layers.ws_conv import StandardiseWeights
from fednorm.pieces.changes import add_transform, chain, operate
from fednorm.pieces.grads import AdaptiveClip, ClipNorm


def _clip(clip: float) -> Change:
    return add_transform(AdaptiveClip(), **{"agc.clip": clip})


@register(
    "nonorm", paper="FedWon's ablation (arXiv 2306.05879, Table 5)", summary="remove BatchNorm and put nothing there"
)
def nonorm(bias: bool = True) -> Part:
    return Part(operate(DropNorms(bias)), claims=frozenset({NORM_LAYERS}))


@register(
    "ws",
    paper="Qiao et al. 2019 (arXiv 1903.10520)",
    summary="standardise the weights of every convolution; with gn it is the GN+WS of the FixBN study",
)
def ws(style: Literal["qiao", "scaled"] = "qiao", gain: float | None = None) -> Part:
    return Part(operate(StandardiseWeights(style, gain)), claims=frozenset({CONVOLUTIONS}))


@register("agc", paper="Brock et al. 2021 (arXiv 2102.06171)", summary="clip each unit's gradient by its weight's norm")
def agc(clip: float = 0.1) -> Part:
    return Part(_clip(clip), claims=frozenset({CLIPPING}))


@register(
    "clip", paper="Pascanu et al. 2013 (arXiv 1211.5063)", summary="clip the whole gradient's norm, as HeteroFL does"
)
def clip(norm: float = 1.0) -> Part:
    return Part(add_transform(ClipNorm(), **{"clip.norm": norm}), claims=frozenset({CLIPPING}))


@register(
    "fedwon",
    paper="Zhuang, Lyu 2024, ICLR (arXiv 2306.05879)",
    summary="no norm layers: scaled weight standardization and adaptive gradient clipping; works at batch size 1",
)
def fedwon(
    clip: float = 0.1,
    use_agc: bool = True,
    gain: float = 1.7128585504496627,
    learnable_gain: bool = False,
    bias: bool = True,
    residual: Literal["plain", "nf"] = "plain",
    linear_gain: float | None = None,
) -> Part:
    surgery: list[Surgery] = [DropNorms(bias), StandardiseWeights("scaled", gain, learnable_gain, linear_gain)]
    if residual == "nf":
        surgery.append(ScaleResiduals("nf"))
    changes = [operate(*surgery)] + [_clip(clip)] * use_agc
    return Part(chain(*changes), claims=frozenset({NORM_LAYERS, CONVOLUTIONS} | ({CLIPPING} if use_agc else set())))
