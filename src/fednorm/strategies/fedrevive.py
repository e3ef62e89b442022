"""FedRevive: stale updates are revived by distillation, without data, from the models that came last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fednorm.core.method import Method
from fednorm.core.registry import extended
from fednorm.core.state import Kind, Policy
from fednorm.core.strategy import Discount, Strategy
from fednorm.core.strategy_registry import register_strategy
from fednorm.errors import ConfigError
from fednorm.pieces.discounts import Cosine, Exponential, Linear, Steps
from fednorm.strategies.revive.network import Source
from fednorm.strategies.revive.reviser import Revive
from fednorm.strategies.revive.settings import Settings, Share

_PAPER = "Askin et al. 2025 (arXiv 2511.00655)"
Schedule = Literal["cosine", "constant", "linear", "exponential", "stepwise"]


@dataclass(frozen=True)
class Additions:
    """The parts of methods that tell the server what FedRevive's losses ask for."""

    statistics: Source
    counted: bool

    def __call__(self, method: Method) -> str:
        local = any(phase.policy[Kind.STATISTIC] is Policy.LOCAL for phase in method.phases)
        if local and self.statistics != "none":
            raise ConfigError(
                f"'{method.name}' keeps statistics local, so FedRevive's feature loss has none to match; write "
                "fedrevive(statistics=none) to do without it, or let the server see those of each client, never "
                "averaged: silobn(report=true) or fedbn(report=true) with fedrevive(statistics=bn)"
            )
        wanted = ["tracker"] * (self.statistics == "tracker") + ["label-counts"] * self.counted
        there = {part.label.partition("(")[0] for part in method.parts}
        added = "+".join(part for part in wanted if part not in there)
        if "tracker" in added:
            _refuse_clash(method)
        return added


def _refuse_clash(method: Method) -> None:
    """Refuse a method that trackers do not go with by a word on where they come from: the user named none."""
    try:
        extended(method, "tracker")
    except ConfigError as error:
        raise ConfigError(
            f"{error} ('tracker' is what FedRevive's default statistics=tracker adds; fedrevive(statistics=bn) matches "
            "BatchNorm's own statistics in its place, fedrevive(statistics=none) none)"
        ) from None


@register_strategy(
    "fedrevive",
    paper=_PAPER,
    summary="every update makes a version; the staler it is, the more of it is replaced by data-free distillation",
)
def fedrevive(
    b: int = 1,
    lr: float = 0.1,
    schedule: Schedule = "cosine",
    s_max: float = 75.0,
    slope: float = 0.005,
    share: float = 0.5,
    freeze: int = 50,
    warmup: int = 100,
    teachers: int = 8,
    statistics: Source = "tracker",
    proportions: Literal["probed", True] = "probed",
    probes: int = 64,
    images: Literal["synthetic", "real"] = "synthetic",
    batch: int = 64,
    steps: int = 2,
    every: int = 1,
    latent: int = 256,
    width: int = 128,
    conditioning: float = 0.2,
    generator_lr: float = 3e-3,
    latent_lr: float = 1e-3,
    feature: float = 0.003,
    one_hot: float = 1.0,
    adversarial: float = 0.1,
    pool: int = 16_000,
    crop: int = 4,
    flip: bool = True,
    kd_batch: int = 32,
    kd_steps: int = 10,
    kd_lr: float = 1e-4,
    kd_decay: float = 1e-5,
    temperature: float = 1.0,
) -> Strategy:
    if not 0 <= share <= 1:
        raise ConfigError(f"share={share} is out of range; give 0 up to 1")
    keeps: dict[str, Discount] = {
        "cosine": Cosine(s_max),
        "constant": Share(share),
        "linear": Linear(slope),
        "exponential": Exponential(slope),
        "stepwise": Steps(2 * s_max),
    }
    settings = Settings(
        keeps=keeps[schedule],
        freeze=freeze,
        warmup=warmup,
        teachers=teachers,
        statistics=statistics,
        counted=proportions is True,
        probes=probes,
        synthetic=images == "synthetic",
        batch=batch,
        steps=steps,
        every=every,
        latent=latent,
        width=width,
        conditioning=conditioning,
        generator_lr=generator_lr,
        latent_lr=latent_lr,
        feature=feature,
        one_hot=one_hot,
        adversarial=adversarial,
        pool=pool,
        crop=crop,
        flip=flip,
        kd_batch=kd_batch,
        kd_steps=kd_steps,
        kd_lr=kd_lr,
        kd_decay=kd_decay,
        temperature=temperature,
    )
    return Strategy(buffer=b, rate=lr, revise=Revive(settings), adds=Additions(statistics, settings.counted))


@register_strategy(
    "dd-fedrevive",
    paper=_PAPER,
    summary="FedRevive on real images that the server holds: an upper bound, since no federation has them",
)
def dd_fedrevive(
    b: int = 1,
    lr: float = 0.2,
    share: float = 0.5,
    teachers: int = 8,
    freeze: int = 0,
    warmup: int = 0,
    proportions: Literal["probed", True] = "probed",
    crop: int = 4,
    flip: bool = True,
    kd_batch: int = 32,
    kd_steps: int = 10,
    kd_lr: float = 3e-4,
    kd_decay: float = 0.0,
    temperature: float = 2.0,
) -> Strategy:
    return fedrevive(
        b=b,
        lr=lr,
        schedule="constant",
        share=share,
        teachers=teachers,
        freeze=freeze,
        warmup=warmup,
        statistics="none",
        proportions=proportions,
        images="real",
        crop=crop,
        flip=flip,
        kd_batch=kd_batch,
        kd_steps=kd_steps,
        kd_lr=kd_lr,
        kd_decay=kd_decay,
        temperature=temperature,
    )
