"""One class for each example, or for each pixel of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fednorm.core.task import Sums
from fednorm.scoring.class_weights import PLAIN, CrossEntropy


@dataclass(frozen=True)
class Classification:
    """Cross-entropy and accuracy, overall and per class."""

    num_classes: int
    entropy: CrossEntropy = PLAIN
    name: str = "classification"
    kind: str = "classification"
    metric: str = "accuracy"
    higher_is_better: bool = True
    percent: bool = True

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return self.entropy(output, y)

    def score(self, output: Tensor, y: Tensor) -> Sums:
        hits = (output.argmax(1) == y).to(torch.float64)
        zeros = torch.zeros(self.num_classes, dtype=torch.float64, device=y.device)
        return {
            **self.entropy.sums(output, y),
            "correct": zeros.index_add(0, y, hits),
            "count": zeros.index_add(0, y, torch.ones_like(hits)),
        }

    def summary(self, sums: Mapping[str, Tensor]) -> dict[str, Any]:
        correct, count = sums["correct"], sums["count"]
        total = float(count.sum())
        return {
            "accuracy": 100 * float(correct.sum()) / total,
            "loss": self.entropy.mean(sums, total),
            "per_class": [100 * float(c) / float(n) if n else None for c, n in zip(correct, count, strict=True)],
        }


@dataclass(frozen=True)
class Segmentation:
    """Pixel cross-entropy with an ignored label, mean IoU and pixel accuracy."""

    num_classes: int
    ignore_index: int = 255
    entropy: CrossEntropy = PLAIN
    name: str = "segmentation"
    kind: str = "segmentation"
    metric: str = "miou"
    higher_is_better: bool = True
    percent: bool = True

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return self.entropy(output, y.long(), self.ignore_index)

    def score(self, output: Tensor, y: Tensor) -> Sums:
        y = y.long()  # masks are stored as bytes
        kept = y != self.ignore_index
        pairs = (y * self.num_classes + output.argmax(1))[kept]
        confusion = torch.bincount(pairs, minlength=self.num_classes**2).to(torch.float64)
        return {**self.entropy.sums(output, y, self.ignore_index), "confusion": confusion.view(self.num_classes, -1)}

    def summary(self, sums: Mapping[str, Tensor]) -> dict[str, Any]:
        confusion = sums["confusion"]
        hit, total = confusion.diagonal(), float(confusion.sum())
        union = confusion.sum(0) + confusion.sum(1) - hit
        ious = [100 * float(h) / float(u) if u else None for h, u in zip(hit, union, strict=True)]
        present = [iou for iou in ious if iou is not None]
        return {
            "miou": sum(present) / len(present),
            "pixel_accuracy": 100 * float(hit.sum()) / total,
            "loss": self.entropy.mean(sums, total),
            "per_class": ious,
        }
