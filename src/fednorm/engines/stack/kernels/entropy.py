"""A Triton kernel of the mean cross-entropy of each client's batch, and of its gradient, in one pass."""
# Triton reads annotations of constants at run time, so this file does without `from __future__ import annotations`.

import torch
import triton
import triton.language as tl
from torch import Tensor

from fednorm.engines.stack.kernels.launch import kernel

_ELEMENTS = 4096
"""Numbers of a program at a time, which stay in registers."""


@kernel("batch", "classes", "ignored")
def _entropy_kernel(
    x_ptr, y_ptr, loss_ptr, grad_ptr, batch, classes, ignored, ROWS: tl.constexpr, CLASSES: tl.constexpr
):  # fmt: skip
    """A client's whole batch. A label that is no class, and is not `ignored`, leaves no number."""
    client = tl.program_id(0).to(tl.int64)
    label = tl.arange(0, CLASSES)
    count = 0.0
    for start in range(0, batch, ROWS):
        row = start + tl.arange(0, ROWS)
        y = tl.load(y_ptr + client * batch + row, mask=row < batch, other=ignored)
        count += tl.sum((y != ignored).to(tl.float32), 0)
    total = 0.0
    for start in range(0, batch, ROWS):
        row = start + tl.arange(0, ROWS)
        y = tl.load(y_ptr + client * batch + row, mask=row < batch, other=ignored)
        at = (client * batch + row)[:, None] * classes + label[None, :]
        inside = (row < batch)[:, None] & (label < classes)[None, :]
        x = tl.load(x_ptr + at, mask=inside, other=0.0)
        x = tl.where((label < classes)[None, :], x, float("-inf"))
        top = tl.max(x, 1)
        power = tl.exp(x - top[:, None])
        whole = tl.sum(power, 1)
        own = label[None, :] == y[:, None]
        missed = tl.log(whole) + top - tl.sum(tl.where(own, x, 0.0), 1)
        missed = tl.where((y >= 0) & (y < classes), missed, float("nan"))
        total += tl.sum(tl.where(y != ignored, missed, 0.0), 0)
        away = (power / whole[:, None] - own.to(tl.float32)) / count
        tl.store(grad_ptr + at, tl.where((y != ignored)[:, None], away, 0.0), mask=inside)
    tl.store(loss_ptr + client, total / count)


def run_entropy(x: Tensor, y: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Losses (client,) and gradients of x (client, row, class), contiguous, for labels (client, row)."""
    clients, batch, classes = x.shape
    loss, grad = x.new_empty(clients), torch.empty_like(x)
    width = triton.next_power_of_2(classes)
    rows = min(triton.next_power_of_2(batch), max(1, _ELEMENTS // width))
    _entropy_kernel[(clients,)](
        x, y.contiguous(), loss, grad, batch, classes, ignored, ROWS=rows, CLASSES=width, num_warps=4
    )
    return loss, grad
