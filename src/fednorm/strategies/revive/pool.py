"""The images that were made last, by label."""

from __future__ import annotations

import torch
from torch import Tensor

from fednorm.core import rng
from fednorm.core.state import Tree


class ImagePool:
    """The newest images, as bytes, with the labels they were made for; the oldest give way."""

    def __init__(self, capacity: int, shape: tuple[int, int, int], device: torch.device) -> None:
        self.capacity = capacity
        self.images = torch.empty(0, *shape, dtype=torch.uint8, device=device)
        self.labels = torch.empty(0, dtype=torch.int64, device=device)

    def __len__(self) -> int:
        return len(self.labels)

    def add(self, images: Tensor, labels: Tensor) -> None:
        """Take images in [0, 1], or bytes."""
        made = images if images.dtype == torch.uint8 else (images.detach() * 255).round().clamp(0, 255).byte()
        self.images = torch.cat([self.images, made.to(self.images.device)])[-self.capacity :]
        self.labels = torch.cat([self.labels, labels.to(self.labels.device)])[-self.capacity :]

    def draw(self, key: Tensor, labels: Tensor, num_classes: int) -> Tensor:
        """An image in [0, 1] for each label, any image where there is none with it; of several keys, a row for each."""
        return self.images[chosen(key, self.labels, labels, num_classes)].float() / 255

    def tree(self) -> Tree:
        return {"images": self.images, "labels": self.labels}

    def load(self, tree: Tree) -> None:
        self.images, self.labels = tree["images"].to(self.images.device), tree["labels"].to(self.labels.device)


def chosen(key: Tensor, there: Tensor, wanted: Tensor, num_classes: int) -> Tensor:
    """For each wanted label the place of one among those that are there, of any where none is.

    Several keys draw for a row of labels each.

    >>> chosen(rng.key(0), torch.tensor([2, 1, 1]), torch.tensor([2, 2]), 3)
    tensor([0, 0])
    """
    chance = rng.uniform(key, wanted.shape[key.dim() :]).to(wanted.device).double()
    order = torch.argsort(there, stable=True)
    counts = torch.bincount(there, minlength=num_classes)
    first, own = (counts.cumsum(0) - counts)[wanted], counts[wanted]
    at = (first + (chance * own).long()).clamp_max(len(there) - 1)
    return torch.where(own > 0, order[at], (chance * len(there)).long())


def draw_labels(key: Tensor, proportions: Tensor, count: int) -> Tensor:
    """Labels, each with the chance its class has in the proportions (C,); of several keys by a row of them each."""
    edges = proportions.double().cumsum(-1)
    chance = rng.uniform(key, (count,)).to(proportions.device).double() * edges[..., -1:]
    return torch.searchsorted(edges, chance, right=True).clamp_max(proportions.shape[-1] - 1)
