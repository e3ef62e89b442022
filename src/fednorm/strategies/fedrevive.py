"""FedRevive: stale updates are revived by distillation, without data, from the models that came last."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_type_hints

from fednorm.core.method import Method
from fednorm.core.registry import extended
from fednorm.core.state import Kind, Policy
from fednorm.core.strategy import Strategy
from fednorm.core.strategy_registry import register_strategy
from fednorm.errors import ConfigError
from fednorm.strategies.revive.network import Source
from fednorm.strategies.revive.reviser import Revive
from fednorm.strategies.revive.settings import Settings

_PAPER = "Askin et al. 2025 (arXiv 2511.00655)"
_Factory = TypeVar("_Factory", bound=Callable[..., Strategy])


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


def _takes_settings(make: _Factory) -> _Factory:
    """Name the fields of `Settings` as the options of a factory that hands them on, each with its type and default."""
    own = [each for each in inspect.signature(make).parameters.values() if each.kind is not each.VAR_KEYWORD]
    vars(make)["__signature__"] = inspect.Signature([*own, *inspect.signature(Settings).parameters.values()])
    make.__annotations__ |= get_type_hints(Settings)
    return make


@register_strategy(
    "fedrevive",
    paper=_PAPER,
    summary="every update makes a version; the staler it is, the more of it is replaced by data-free distillation",
)
@_takes_settings
def fedrevive(b: int = 1, lr: float = 0.1, **settings: Any) -> Strategy:
    return _strategy(b, lr, Settings(**settings))


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
    settings = Settings(
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
    return _strategy(b, lr, settings)


def _strategy(b: int, lr: float, settings: Settings) -> Strategy:
    return Strategy(buffer=b, rate=lr, revise=Revive(settings), adds=Additions(settings.statistics, settings.counted))
