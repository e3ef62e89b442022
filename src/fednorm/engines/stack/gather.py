"""Where a stack's batches come from: one kernel for images on a GPU, `Batches.gather` for all else."""

from __future__ import annotations

import torch
from torch import Tensor

from fednorm.data.augment import parse, sizes
from fednorm.data.batches import Batches
from fednorm.engines.stack.kernels import ops

_CODES = {"crop": 0, "window": 0, "flip": 1, "rotate": 2}
"""What the kernel does for a step of an augmentation."""


class Gather:
    """The examples of some runs, from which stacked batches are gathered."""

    def __init__(self, batches: Batches, channels_last: bool) -> None:
        self._batches = batches
        data = batches.pool
        batches.inputs(data.x[:1])  # makes what it keeps at hand before anything is traced
        chain = parse(batches.augmentation)
        images = data.x.dtype is torch.uint8 and data.x.dim() == 4 and data.y.dim() == 1
        known = all(name in _CODES for name, _ in chain.steps)
        self._fits = channels_last and ops.kernels_run(data.x.device) and images and known
        if not self._fits:
            return
        channels = data.x.shape[1]
        before = sizes(chain, *data.x.shape[-2:])
        self._size = list(before[-1])
        steps = [(_CODES[name], *size) for (name, _), size in zip(chain.steps, before, strict=False)]
        self._plan = torch.tensor(steps, dtype=torch.int64, device=data.x.device)
        scale = (data.mean or (0.0,) * channels, data.std or (1.0,) * channels)
        self._scale = torch.tensor(scale, dtype=torch.float32, device=data.x.device)

    def gather(self, rows: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """(x, y) of stacked batches: `Batches.gather`, or its equal in one launch."""
        if not self._fits:
            return self._batches.gather(rows, drawn)
        data = self._batches.pool
        x = ops.images(data.x, rows, drawn, self._plan, self._scale, self._size, self._batches.dtype)
        return x, data.y[rows]
