"""How a client that never trained gets its statistics: what such a rule is, and the default."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from fednorm.core.state import Tree
from fednorm.core.step import StepSpec


@dataclass(frozen=True, kw_only=True)
class Newcomer:
    """A rule that gives a newcomer its statistics, from the average of those that training clients keep local.

    A rule that looks at the newcomer's unlabelled data before it is tested says so with `uses_data`, one that moves the
    statistics with every test batch with `uses_batches`.
    """

    variance: Literal["mean", "pooled"] = "mean"
    """Whether the average of local variances has the part that differs between clients."""
    name: ClassVar[str] = "given"
    uses_data: ClassVar[bool] = False
    uses_batches: ClassVar[bool] = False

    @property
    def pools_variances(self) -> bool:
        return self.variance == "pooled"

    def from_data(self, spec: StepSpec, state: Tree, batches: Iterable[tuple[Tensor, Tensor]]) -> Tree:
        """The state to test with, given batches of the newcomer's own data."""
        return state

    def from_batch(self, spec: StepSpec, state: Tree, x: Tensor) -> Tree:
        """The state to test a batch with, and to go on from."""
        return state


@dataclass(frozen=True, kw_only=True)
class AsGiven(Newcomer):
    """The statistics stay as they are."""
