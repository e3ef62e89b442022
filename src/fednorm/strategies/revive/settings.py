"""The numbers of FedRevive; the defaults are those published for CIFAR-10."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from fednorm.core.strategy import Discount
from fednorm.errors import ConfigError
from fednorm.pieces.discounts import Cosine, Exponential, Linear, Steps
from fednorm.strategies.revive.network import Source


@dataclass(frozen=True)
class Share:
    """Every update keeps the same share of itself, however stale it is."""

    distilled: float

    def __call__(self, staleness: int) -> float:
        return 1 - self.distilled


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a user may say of FedRevive: the options of the strategy, each under its name there."""

    schedule: Literal["cosine", "constant", "linear", "exponential", "stepwise"] = "cosine"
    """how the share of distillation in an update rises with its staleness"""
    s_max: float = 75.0
    """of the cosine and the steps: half the staleness from which on nothing of an update is left"""
    slope: float = 0.005
    """of the linear and the exponential schedule"""
    share: float = 0.5
    """the constant one"""
    freeze: int = 50
    """versions before anything is synthesised"""
    warmup: int = 100
    """versions before the adversarial loss counts, and after which there is distillation"""
    teachers: int = 8
    statistics: Source = "tracker"
    proportions: Literal["probed", True] = "probed"
    """whether the server probes the clients' models, or they tell the counts of their labels"""
    probes: int = 64
    images: Literal["synthetic", "real"] = "synthetic"
    """whether images are made, or real ones are at the server: the data-dependent upper bound"""
    batch: int = 64
    steps: int = 2
    every: int = 1
    """versions from one synthesis to the next"""
    latent: int = 256
    width: int = 128
    conditioning: float = 0.2
    generator_lr: float = 3e-3
    latent_lr: float = 1e-3
    feature: float = 0.003
    one_hot: float = 1.0
    adversarial: float = 0.1
    pool: int = 16_000
    crop: int = 4
    flip: bool = True
    kd_batch: int = 32
    """images that each teacher has in a step"""
    kd_steps: int = 10
    kd_lr: float = 1e-4
    kd_decay: float = 1e-5
    temperature: float = 1.0

    def __post_init__(self) -> None:
        for name in ("teachers", "probes", "batch", "steps", "every", "latent", "width", "pool"):
            self._refuse(name, getattr(self, name) >= 1, "1 or more")
        for name in ("kd_batch", "kd_steps"):
            self._refuse(name, getattr(self, name) >= 1, "1 or more")
        for name in ("generator_lr", "latent_lr", "kd_lr", "temperature"):
            self._refuse(name, 0 < getattr(self, name) < math.inf, "a number above 0")
        for name in ("freeze", "warmup", "conditioning", "feature", "one_hot", "adversarial", "kd_decay", "crop"):
            self._refuse(name, 0 <= getattr(self, name) < math.inf, "0 or more")
        self._refuse("share", 0 <= self.share <= 1, "0 up to 1")
        self.keeps  # noqa: B018 (refuses what makes no discount)

    def _refuse(self, name: str, fits: bool, expected: str) -> None:
        if not fits:
            raise ConfigError(f"{name}={getattr(self, name)} is out of range; give {expected}")

    @cached_property
    def keeps(self) -> Discount:
        """1 - beta: the share of itself that an update keeps; distillation has the rest."""
        schedules: dict[str, Discount] = {
            "cosine": Cosine(self.s_max),
            "constant": Share(self.share),
            "linear": Linear(self.slope),
            "exponential": Exponential(self.slope),
            "stepwise": Steps(2 * self.s_max),
        }
        return schedules[self.schedule]

    @property
    def counted(self) -> bool:
        """Whether clients tell the counts of their labels."""
        return self.proportions is True

    @property
    def synthetic(self) -> bool:
        """Whether images are made."""
        return self.images == "synthetic"

    def beta(self, staleness: int) -> float:
        """The share of distillation in an update."""
        return 1 - self.keeps(staleness)

    @property
    def augmentation(self) -> str:
        """What images go through before a model sees them."""
        return "+".join([f"crop({self.crop})"] * (self.crop > 0) + ["flip"] * self.flip) or "none"
