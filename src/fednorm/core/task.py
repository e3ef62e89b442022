"""What the outputs of a model mean, as the rest of the code knows it; `scoring.tasks` has the kinds there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

Sums = dict[str, Tensor]
"""Float64 sums over examples; two sums add, so clients and batches can be joined in any grouping."""


@runtime_checkable
class AnyTask(Protocol):
    """Loss and scores of a kind of problem; `fednorm.Task` makes one from a loss and some metrics."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str:
        """What targets it needs: classification, multilabel, regression, segmentation; empty: whatever the data has."""
        ...

    @property
    def metric(self) -> str:
        """The headline number of `summary`."""
        ...

    @property
    def higher_is_better(self) -> bool:
        """Of the headline number."""
        ...

    @property
    def percent(self) -> bool:
        """Whether the headline number is between 0 and 100; otherwise it has the targets' unit."""
        ...

    def loss(self, output: Any, y: Tensor) -> Tensor:
        """Mean loss over the batch."""
        ...

    def score(self, output: Any, y: Tensor) -> Sums:
        """Sums that `summary` turns into numbers; `loss` is one of them."""
        ...

    def summary(self, sums: Mapping[str, Tensor]) -> dict[str, Any]:
        """Numbers for people, and lists by class or target; a number that is not defined is None."""
        ...
