"""How images in [0, 1] become inputs of the classifier, and the other way round."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fednorm.data.augment import apply, augment, draws, parse


@dataclass(frozen=True)
class Inputs:
    """Augmented as clients do it, then scaled as they do."""

    augmentation: str
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __call__(self, images: Tensor, key: Tensor) -> Tensor:
        """Inputs that are augmented by what the key draws, or each of several keys for a row of images."""

        def moved_by(images: Tensor, key: Tensor) -> Tensor:
            return augment(images, key, self.augmentation)

        moved = torch.vmap(moved_by)(images, key) if key.dim() else moved_by(images, key)
        return _scaled(moved, self.scale(moved))

    def drawn(self, key: Tensor, shape: tuple[int, ...]) -> Tensor:
        """What a key draws for images of a shape."""
        chain = parse(self.augmentation)
        return draws(key, shape, chain) if chain.steps else torch.zeros(shape[0], 0, 2, dtype=torch.int64)

    def moved(self, images: Tensor, drawn: Tensor, scale: Tensor) -> Tensor:
        """The same inputs, by what was drawn before and a scale that is there already."""
        return _scaled(apply(images, None, drawn, parse(self.augmentation))[0] if drawn.shape[1] else images, scale)

    def images_of(self, inputs: Tensor) -> Tensor:
        """The images in [0, 1] that some inputs were made of: what moves into an image from outside is black there."""
        if not self.mean:
            return inputs
        mean, std = self.scale(inputs)
        return inputs * std + mean

    def scale(self, like: Tensor) -> Tensor:
        """Mean and deviation of each channel, by which inputs are scaled; of none where they are not."""
        return like.new_tensor((self.mean, self.std)).view(2, 1, -1, 1, 1)


def _scaled(images: Tensor, scale: Tensor) -> Tensor:
    return (images - scale[0]) / scale[1] if scale.numel() else images
