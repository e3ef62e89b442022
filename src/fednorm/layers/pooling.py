"""Max pooling whose gradients lie as its images do.

Torch's kernel for the CPU goes by the layout of the gradient that comes in. Behind a flatten that is not the layout of
channels-last images: the indices, and twice the whole gradient of the input, are then copied from one to the other.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def gradients_as_images(model: nn.Module) -> Generator[None]:
    """Within, gradients reach the max poolings of a model in channels-last layout, with the same values."""
    pools = [module for module in model.modules() if isinstance(module, nn.MaxPool2d)]
    hooks = [pool.register_forward_hook(_ask) for pool in pools]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _ask(pool: nn.Module, inputs: Any, output: Any) -> None:
    if isinstance(output, Tensor) and output.requires_grad and output.dim() == 4:
        output.register_hook(_lay_out)  # pyright: ignore[reportUnknownMemberType]


def _lay_out(gradient: Tensor) -> Tensor:
    return gradient.contiguous(memory_format=torch.channels_last)
