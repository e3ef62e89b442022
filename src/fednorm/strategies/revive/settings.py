"""The numbers of FedRevive; the defaults are those published for CIFAR-10."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fednorm.core.strategy import Discount
from fednorm.errors import ConfigError
from fednorm.pieces.discounts import Cosine
from fednorm.strategies.revive.network import Source


@dataclass(frozen=True)
class Share:
    """Every update keeps the same share of itself, however stale it is."""

    distilled: float

    def __call__(self, staleness: int) -> float:
        return 1 - self.distilled


_COSINE = Cosine(75.0)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a user may say of FedRevive."""

    keeps: Discount = _COSINE
    """1 - beta: the share of itself that an update keeps; distillation has the rest"""
    freeze: int = 50
    """versions before anything is synthesised"""
    warmup: int = 100
    """versions before the adversarial loss counts, and after which there is distillation"""
    teachers: int = 8
    statistics: Source = "tracker"
    counted: bool = False
    """whether clients tell the counts of their labels, or the server probes their models"""
    probes: int = 64
    probe_temperature: float = 0.8
    probe_uploads: int = 2
    synthetic: bool = True
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
        for name in ("teachers", "probes", "probe_uploads", "batch", "steps", "every", "latent", "width", "pool"):
            self._refuse(name, getattr(self, name) >= 1, "1 or more")
        for name in ("kd_batch", "kd_steps"):
            self._refuse(name, getattr(self, name) >= 1, "1 or more")
        for name in ("probe_temperature", "generator_lr", "latent_lr", "kd_lr", "temperature"):
            self._refuse(name, 0 < getattr(self, name) < math.inf, "a number above 0")
        for name in ("freeze", "warmup", "conditioning", "feature", "one_hot", "adversarial", "kd_decay", "crop"):
            self._refuse(name, 0 <= getattr(self, name) < math.inf, "0 or more")

    def _refuse(self, name: str, fits: bool, expected: str) -> None:
        if not fits:
            raise ConfigError(f"{name}={getattr(self, name)} is out of range; give {expected}")

    def beta(self, staleness: int) -> float:
        """The share of distillation in an update."""
        return 1 - self.keeps(staleness)

    @property
    def augmentation(self) -> str:
        """What images go through before a model sees them."""
        return "+".join([f"crop({self.crop})"] * (self.crop > 0) + ["flip"] * self.flip) or "none"
