"""Scalars that clients report of their work."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fednorm.core.method import Facts
from fednorm.core.state import Kind, Tree


@dataclass(frozen=True)
class StatisticsShift:
    """D: the mean over all batch-norm channels of |statistics after local work - statistics received| (FixBN)."""

    def __call__(self, end: Tree, start: Tree, facts: Facts) -> Tensor:
        keys = [entry.key for entry in facts.entries.values() if entry.kind is Kind.STATISTIC]
        return torch.cat([(end[key] - start[key]).abs().flatten() for key in keys]).mean()
