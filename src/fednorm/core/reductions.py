"""The only ways a merge joins clients: a weighted sum and a maximum over the leading axis of a stack.

Merges are written in these two, so that a stack may hold a whole cohort or the part of it that one process trains.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

WIDE_NUMBERS = 1 << 16
"""Numbers of a stack that are turned into float64 at a time: few enough to stay in a processor's caches."""


def fold(stack: Tensor, weights: Tensor, onto: Tensor | None = None) -> Tensor:
    """sum_k p_k x_k in float64 over the leading axis, after what is `onto`; on the host left to right.

    So its bits are defined there, and a sum that stops after some clients goes on to the same bits.

    >>> fold(torch.tensor([[1.0, 2.0], [3.0, 6.0]]), torch.tensor([0.5, 0.5], dtype=torch.float64))
    tensor([2., 4.], dtype=torch.float64)
    """
    if stack.device.type not in ("cpu", "mps"):
        total = (wide(stack) * weights.reshape(-1, *[1] * (stack.dim() - 1))).sum(0)
        return total if onto is None else onto + total
    rows, shares = stack.unsqueeze(-1).flatten(1), weights.unsqueeze(1)
    some = max(1, WIDE_NUMBERS // max(1, rows.shape[1]))
    parts = [(rows, shares)]
    if len(rows) > some:
        parts = [(rows[at : at + some], shares[at : at + some]) for at in range(0, len(rows), some)]
    total = None if onto is None else onto.flatten().clone()
    for part, share in parts:
        # Products, then sums: fused they would round differently in the vectorised part of a tensor and in its tail.
        wider = wide(part)  # if it is a copy, it is written over
        for product in (wider * share if wider is part else wider.mul_(share)).unbind():
            total = product if total is None else total.add_(product)
    if total is None:
        raise ValueError("a sum over no clients has no value")
    return total.reshape(stack.shape[1:])


def wide(tensor: Tensor) -> Tensor:
    """A tensor in float64, on the host where the device has no such type."""
    return tensor.to(wide_device(tensor.device), torch.float64)


def wide_device(device: torch.device) -> torch.device:
    """The device itself, or the host where the device has no float64."""
    return torch.device("cpu") if device.type == "mps" else device


class Cohort:
    """The clients of a merge, where the stacks hold all of them; one that is spread over processes overrides it all."""

    def weighted_sum(self, stack: Tensor, weights: Tensor) -> Tensor:
        """The sum over the cohort, of the clients here with their weights."""
        return fold(stack, weights)

    def largest(self, stack: Tensor) -> Tensor:
        """The maximum over the cohort."""
        return stack.amax(0)

    def gathered(self, stack: Tensor) -> Tensor:
        """The stack of the whole cohort."""
        return stack

    def own(self, weights: Tensor) -> Tensor:
        """The part of a vector over the cohort that is of the clients here."""
        return weights


_WHOLE = Cohort()
_COHORT: ContextVar[Cohort | None] = ContextVar("cohort", default=None)


def cohort() -> Cohort:
    """The cohort whose clients are merged now."""
    return _COHORT.get() or _WHOLE


@contextmanager
def merging(clients: Cohort) -> Generator[None]:
    """Merge over this cohort inside the context."""
    token = _COHORT.set(clients)
    try:
        yield
    finally:
        _COHORT.reset(token)


def weighted_sum(stack: Tensor, weights: Tensor) -> Tensor:
    """sum_k p_k x_k over the cohort in float64, in the order of client ids where that order can show."""
    return cohort().weighted_sum(stack, weights)


def largest(stack: Tensor) -> Tensor:
    """max_k x_k over the cohort."""
    return cohort().largest(stack)
