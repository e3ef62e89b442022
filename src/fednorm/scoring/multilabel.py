"""Any number of labels for each example."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fednorm.core.task import Sums
from fednorm.scoring.shapes import refuse_unequal


@dataclass(frozen=True)
class MultiLabel:
    """Binary cross-entropy of each label, and F1: macro (the mean over labels) and micro (all labels as one).

    A label counts as predicted where its probability is above `threshold`. F1 is 2 hits / (predicted + present). A
    label that neither is present nor was predicted has none; where no label has one, nothing was missed, and it is 100.
    """

    num_labels: int
    threshold: float = 0.5
    name: str = "multilabel"
    kind: str = "multilabel"
    metric: str = "f1"
    higher_is_better: bool = True
    percent: bool = True

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        refuse_unequal(self.name, output, y)
        return functional.binary_cross_entropy_with_logits(output, y.to(output.dtype))

    def score(self, output: Tensor, y: Tensor) -> Sums:
        loss = self.loss(output, y).to(torch.float64) * len(y)
        predicted, present = output.sigmoid() > self.threshold, y > 0.5
        return {
            "loss": loss,
            "hits": (predicted & present).sum(0).to(torch.float64),
            "named": (predicted.long() + present.long()).sum(0).to(torch.float64),
            "exact": (predicted == present).all(1).sum().to(torch.float64),
            "count": torch.tensor(float(len(y)), dtype=torch.float64, device=y.device),
        }

    def summary(self, sums: Mapping[str, Tensor]) -> dict[str, Any]:
        hits, named, count = sums["hits"], sums["named"], float(sums["count"])
        each = [200 * float(h) / float(n) if n else None for h, n in zip(hits, named, strict=True)]
        found = [f1 for f1 in each if f1 is not None]
        return {
            "f1": sum(found) / len(found) if found else 100.0,
            "f1_micro": 200 * float(hits.sum()) / float(named.sum()) if found else 100.0,
            "exact_match": 100 * float(sums["exact"]) / count,
            "loss": float(sums["loss"]) / count,
            "per_class": each,
        }
