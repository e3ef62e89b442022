"""What the outputs of a model mean, as the rest of the code knows it; `scoring.tasks` has the kinds there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

Sums = dict[str, Tensor]
"""Float64 sums over examples; two sums add, so clients and batches can be joined in any grouping."""


class Task(Protocol):
    """Loss and scores of a kind of problem."""

    @property
    def name(self) -> str: ...
    @property
    def metric(self) -> str:
        """The headline number of `summary`, between 0 and 100."""
        ...

    def loss(self, output: Any, y: Tensor) -> Tensor:
        """Mean loss over the batch."""
        ...

    def score(self, output: Any, y: Tensor) -> Sums:
        """Sums that `summary` turns into numbers."""
        ...

    def summary(self, sums: Mapping[str, Tensor]) -> dict[str, Any]:
        """Numbers for people."""
        ...
