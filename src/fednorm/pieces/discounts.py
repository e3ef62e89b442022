"""What a stale update counts, as a function of how many versions were made since its client was sent the model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fednorm.core.strategy import Constant, Discount
from fednorm.errors import ConfigError

__all__ = ["Constant", "Cosine", "Discount", "Exponential", "Hinge", "Linear", "Polynomial", "Steps"]


def _refuse_negative(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise ConfigError(f"{name}={value} makes no discount of stale updates; give 0 or more")


@dataclass(frozen=True)
class Polynomial:
    """s = (1 + tau)^-a (FedAsync; with a = 1/2 FedBuff's).

    >>> Polynomial(0.5)(0), Polynomial(0.5)(3)
    (1.0, 0.5)
    """

    a: float

    def __post_init__(self) -> None:
        _refuse_negative(a=self.a)

    def __call__(self, staleness: int) -> float:
        return (1 + staleness) ** -self.a


@dataclass(frozen=True)
class Hinge:
    """s = 1 up to a staleness of b, then 1 / (a (tau - b) + 1) (FedAsync).

    >>> Hinge(10, 4)(4), Hinge(10, 4)(5)
    (1.0, 0.09090909090909091)
    """

    a: float
    b: float

    def __post_init__(self) -> None:
        _refuse_negative(a=self.a, b=self.b)

    def __call__(self, staleness: int) -> float:
        return 1.0 if staleness <= self.b else 1 / (self.a * (staleness - self.b) + 1)


@dataclass(frozen=True)
class Cosine:
    """s = (1 + cos(pi tau / (2 s_max))) / 2, and 0 beyond 2 s_max: 1 - beta of FedRevive.

    >>> Cosine(75)(0), round(Cosine(75)(75), 12), Cosine(75)(151)
    (1.0, 0.5, 0.0)
    """

    s_max: float

    def __post_init__(self) -> None:
        if not 0 < self.s_max < math.inf:
            raise ConfigError(f"s_max={self.s_max} is no staleness; give a number above 0")

    def __call__(self, staleness: int) -> float:
        return 0.0 if staleness > 2 * self.s_max else 0.5 * (1 + math.cos(math.pi * staleness / (2 * self.s_max)))


@dataclass(frozen=True)
class Linear:
    """s = 1 - min(1, g tau).

    >>> Linear(0.25)(1), Linear(0.25)(5)
    (0.75, 0.0)
    """

    g: float

    def __post_init__(self) -> None:
        _refuse_negative(g=self.g)

    def __call__(self, staleness: int) -> float:
        return 1 - min(1.0, self.g * staleness)


@dataclass(frozen=True)
class Exponential:
    """s = exp(-l tau).

    >>> Exponential(0.0)(7), round(Exponential(0.5)(2), 6)
    (1.0, 0.367879)
    """

    l: float  # noqa: E741 (the letter that it has in the formula)

    def __post_init__(self) -> None:
        _refuse_negative(l=self.l)

    def __call__(self, staleness: int) -> float:
        return math.exp(-self.l * staleness)


@dataclass(frozen=True)
class Steps:
    """s = 1, 3/4, 1/2, 1/4 in the quarters of a span, then 0.

    >>> [Steps(8)(staleness) for staleness in (0, 1, 2, 7, 8)]
    [1.0, 1.0, 0.75, 0.25, 0.0]
    """

    span: float

    def __post_init__(self) -> None:
        if not 0 < self.span < math.inf:
            raise ConfigError(f"span={self.span} is no staleness; give a number above 0")

    def __call__(self, staleness: int) -> float:
        return 1 - 0.25 * min(4, math.floor(4 * staleness / self.span))
