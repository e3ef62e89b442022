"""What the outputs of a model mean: the only place that knows classification from segmentation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fednorm.core.task import Sums, Task
from fednorm.errors import unknown


@dataclass(frozen=True)
class Classification:
    """Cross-entropy and accuracy, overall and per class."""

    num_classes: int
    name: str = "classification"
    metric: str = "accuracy"

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(output, y)

    def score(self, output: Tensor, y: Tensor) -> Sums:
        hits = (output.argmax(1) == y).to(torch.float64)
        zeros = torch.zeros(self.num_classes, dtype=torch.float64, device=y.device)
        return {
            "loss": functional.cross_entropy(output, y, reduction="sum").to(torch.float64),
            "correct": zeros.index_add(0, y, hits),
            "count": zeros.index_add(0, y, torch.ones_like(hits)),
        }

    def summary(self, sums: Mapping[str, Tensor]) -> dict[str, Any]:
        correct, count = sums["correct"], sums["count"]
        total = float(count.sum())
        return {
            "accuracy": 100 * float(correct.sum()) / total,
            "loss": float(sums["loss"]) / total,
            "per_class": [100 * float(c) / float(n) if n else None for c, n in zip(correct, count, strict=True)],
        }


@dataclass(frozen=True)
class Segmentation:
    """Pixel cross-entropy with an ignored label, mean IoU and pixel accuracy."""

    num_classes: int
    ignore_index: int = 255
    name: str = "segmentation"
    metric: str = "miou"

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(output, y.long(), ignore_index=self.ignore_index)

    def score(self, output: Tensor, y: Tensor) -> Sums:
        y = y.long()  # masks are stored as bytes
        kept = y != self.ignore_index
        pairs = (y * self.num_classes + output.argmax(1))[kept]
        confusion = torch.bincount(pairs, minlength=self.num_classes**2).to(torch.float64)
        loss = functional.cross_entropy(output, y, ignore_index=self.ignore_index, reduction="sum")
        return {"loss": loss.to(torch.float64), "confusion": confusion.view(self.num_classes, -1)}

    def summary(self, sums: Mapping[str, Tensor]) -> dict[str, Any]:
        confusion = sums["confusion"]
        hit, total = confusion.diagonal(), float(confusion.sum())
        union = confusion.sum(0) + confusion.sum(1) - hit
        ious = [100 * float(h) / float(u) if u else None for h, u in zip(hit, union, strict=True)]
        present = [iou for iou in ious if iou is not None]
        return {
            "miou": sum(present) / len(present),
            "pixel_accuracy": 100 * float(hit.sum()) / total,
            "loss": float(sums["loss"]) / total,
            "per_class": ious,
        }


def make_task(name: str, num_classes: int, ignore_index: int = 255) -> Task:
    """The task of a data set."""
    if name == "classification":
        return Classification(num_classes)
    if name == "segmentation":
        return Segmentation(num_classes, ignore_index)
    raise unknown("task", name, ["classification", "segmentation"])
