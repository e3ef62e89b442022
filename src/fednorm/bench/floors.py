"""What a step of all clients cannot be faster than, counted on a network without numbers (torch's `meta` device).

A client's step moves its weights, gradients and momentum: 30 bytes a parameter in bf16 with float32 masters (22 where a
linear layer's gradient is never written down, which the bounds of the table leave out of account). What the
forward pass keeps for the backward pass is written once and read once, 2 bytes a number each. Products are counted by
torch, three times those of the forward pass, and every kernel costs some microseconds to launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from fednorm.bench.cases import CHANNELS, Case

BYTES_A_SECOND = 4.8e12
"""of an H200's memory"""
PRODUCTS_A_SECOND = 989e12
"""of an H200 in bf16: multiplications and additions"""
LAUNCH_SECONDS = 3e-6
PARAMETER_BYTES, KEPT_BYTES = 30, 4
IMAGES = 2
"""What is counted on; batch norms refuse a single one."""


@dataclass(frozen=True)
class Count:
    """What one network has and does."""

    parameters: int
    kept: int
    """numbers that the forward pass of an image leaves for the backward pass"""
    products: int
    """multiplications and additions of a step, for an image"""

    def traffic(self, clients: int) -> float:
        """Seconds that the clients' own weights, gradients and momentum take through the memory."""
        return PARAMETER_BYTES * self.parameters * clients / BYTES_A_SECOND

    def memory(self, clients: int, batch: int) -> float:
        """Seconds of all that must be written and read: the same, and activations."""
        return self.traffic(clients) + KEPT_BYTES * self.kept * clients * batch / BYTES_A_SECOND

    def arithmetic(self, clients: int, batch: int) -> float:
        """Seconds of all products."""
        return self.products * clients * batch / PRODUCTS_A_SECOND

    def floor(self, clients: int, batch: int, launches: float = 0) -> float:
        """Seconds that nothing can be below: memory or arithmetic, and the launches."""
        return max(self.memory(clients, batch), self.arithmetic(clients, batch)) + LAUNCH_SECONDS * launches


def count(case: Case) -> Count:
    """Count a network's numbers and operations; none of them is carried out."""
    net = case.build().to("meta").train()
    own = {_storage(parameter) for parameter in net.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and _storage(tensor) not in own:
            kept[_storage(tensor)] = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor

    x = torch.empty(IMAGES, CHANNELS, case.pixels, case.pixels, device="meta")
    alive: list[Tensor] = []  # until all is counted, so that no storage takes the place of another
    with FlopCounterMode(display=False) as counter, saved_tensors_hooks(keep, lambda tensor: tensor):
        alive.append(net(x))
    return Count(
        parameters=sum(parameter.numel() for parameter in net.parameters()),
        kept=sum(kept.values()) // IMAGES,
        products=3 * counter.get_total_flops() // IMAGES,
    )


def _storage(tensor: Tensor) -> int:
    """What tells one piece of memory from another, where none has an address."""
    return cast(int, tensor.untyped_storage()._cdata)  # pyright: ignore
