"""A data set in memory: images as uint8 tensors, labels, and the domain each row comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from fednorm.data.memory import in_words, memory_limit
from fednorm.errors import ConfigError, unknown

MOST_NUMBERS = 1 << 26
"""Numbers in float32 that are held at a time while images are brought to another size."""


def resize(x: Tensor, height: int, width: int) -> Tensor:
    """uint8 images (N, C, H, W) at another size: bilinear, smoothed when made smaller, some at a time."""
    if x.shape[2:] == (height, width):
        return x
    out = x.new_empty((*x.shape[:2], height, width))
    some = max(1, min(1024, MOST_NUMBERS // (x.shape[1] * height * width)))
    for target, part in zip(out.split(some), x.split(some), strict=True):
        target.copy_(functional.interpolate(part.float(), (height, width), mode="bilinear", antialias=True).round())
    return out


@dataclass(frozen=True, kw_only=True)
class ImageSet:
    """Training and test images (N, C, H, W) uint8 with int64 labels (N,), or uint8 masks (N, H, W) for segmentation.

    `train_domain` and `test_domain` give the row's index in `domain_names`; both are None for a set of one domain.
    """

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    num_classes: int
    classes: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    train_domain: Tensor | None = None
    test_domain: Tensor | None = None
    domain_names: tuple[str, ...] = ()
    task: str = "classification"
    ignore_index: int = -100

    @classmethod
    def of(
        cls,
        name: str,
        train: tuple[Tensor, Tensor],
        test: tuple[Tensor, Tensor],
        classes: Sequence[str],
        mean: tuple[float, ...],
        std: tuple[float, ...],
        num_classes: int | None = None,
    ) -> ImageSet:
        """A set of one domain from (images, labels); `num_classes` where the classes' names may be missing."""
        return cls(
            name=name,
            train_x=train[0],
            train_y=train[1],
            test_x=test[0],
            test_y=test[1],
            num_classes=num_classes or len(classes),
            classes=tuple(classes),
            mean=mean,
            std=std,
        )

    def with_domains(self, train: Sequence[str], test: Sequence[str]) -> ImageSet:
        """The same set, with the names of the domains that its rows come from."""
        names = sorted({*train, *test})
        number = {name: index for index, name in enumerate(names)}
        return replace(
            self,
            train_domain=torch.tensor([number[name] for name in train]),
            test_domain=torch.tensor([number[name] for name in test]),
            domain_names=tuple(names),
        )

    def __post_init__(self) -> None:
        for split, x, y in (("training", self.train_x, self.train_y), ("test", self.test_x, self.test_y)):
            if len(x) != len(y):
                raise ConfigError(f"{self.name}: {len(x)} {split} images but {len(y)} labels; the files do not belong")

    def keep(self, train_rows: Tensor, test_rows: Tensor | None = None) -> ImageSet:
        """The same set with these rows only, in this order."""
        test = torch.arange(len(self.test_y)) if test_rows is None else test_rows
        return replace(
            self,
            train_x=self.train_x[train_rows],
            train_y=self.train_y[train_rows],
            train_domain=None if self.train_domain is None else self.train_domain[train_rows],
            test_x=self.test_x if test_rows is None else self.test_x[test],
            test_y=self.test_y[test],
            test_domain=None if self.test_domain is None else self.test_domain[test],
        )

    def resized(self, side: int) -> ImageSet:
        """The same set with images `side` pixels high; masks by nearest pixel, the shape of the image kept."""
        if self.train_x.dtype != torch.uint8 or self.train_x.dim() != 4:
            raise ConfigError(
                f"data.size={side} is for images in bytes, but an example of '{self.name}' is "
                f"{str(self.train_x.dtype).removeprefix('torch.')} of shape {tuple(self.train_x.shape[1:])}; "
                "leave it out"
            )
        height, width = self.train_x.shape[2:]
        new = (side, side * width // height)
        if new == (height, width):
            return self
        needed = (len(self.train_x) + len(self.test_x)) * self.train_x.shape[1] * new[0] * new[1]
        if needed > memory_limit():
            raise ConfigError(
                f"data.size={side} makes {in_words(needed)} of '{self.name}', and data may take "
                f"{in_words(memory_limit())} here; give a smaller size, or a machine with more memory"
            )
        labels = {}
        if self.task == "segmentation":
            masks = {"train_y": self.train_y, "test_y": self.test_y}
            # The pixel whose middle is nearest, as the image's own middles lie; plain "nearest" is half a pixel off.
            labels = {
                key: functional.interpolate(mask[:, None], new, mode="nearest-exact")[:, 0]
                for key, mask in masks.items()
            }
        return replace(self, train_x=resize(self.train_x, *new), test_x=resize(self.test_x, *new), **labels)

    def keep_domains(self, names: tuple[str, ...]) -> ImageSet:
        """The same set with these domains only, numbered in this order."""
        if self.train_domain is None or self.test_domain is None:
            raise ConfigError(f"{self.name} has no domains to choose from; leave out keep_domains")
        for name in names:
            if name not in self.domain_names:
                raise unknown(f"domain of {self.name}", name, self.domain_names)
        old = torch.tensor([self.domain_names.index(name) for name in names])
        number = torch.full((len(self.domain_names),), -1)
        number[old] = torch.arange(len(names))
        train, test = number[self.train_domain], number[self.test_domain]
        kept = self.keep(torch.nonzero(train >= 0)[:, 0], torch.nonzero(test >= 0)[:, 0])
        return replace(kept, train_domain=train[train >= 0], test_domain=test[test >= 0], domain_names=tuple(names))
