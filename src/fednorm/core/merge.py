"""How the server joins the clients' tensors: what a merge is, and the two that are the default.

Callers stack the clients in ascending id, so the order of arrival cannot change a bit. No merge asks the device for a
value, so it can be captured in a graph and mapped over several runs at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from fednorm.core.reductions import largest, weighted_sum
from fednorm.core.state import Tree

Merge = Callable[[Tree, Tree, Tensor, Tree], tuple[Tree, Tree]]
"""(server's old tensors, the clients' with a leading client axis, weights of the clients, memory) -> (new, new memory).

The trees hold the entries of one kind by part (`weight`, `running_var`, ...), so that a rule can treat a mean and a
variance together. A rule works element by element: element i of its result depends on elements i of the parts and of
the memory, never on their neighbours or their shape. So the server hands it many layers with the same parts as one,
each part flattened and laid end to end. Memory of the elements of a part is named after it, `weight` or `weight.m`;
under any other name it is a number common to the layers. A rule may ask whether there is memory, not what it holds.
Over clients it reduces by `reductions` alone, since a stack may hold only those of one process.
"""


@runtime_checkable
class Fusable(Protocol):
    """A merge that does the same to every element, whatever its part, and remembers nothing.

    So the server merges all its entries at once, across layers and kinds, with `joined`.
    """

    def joined(self, stack: Tensor, weights: Tensor) -> Tensor:
        """The merge of one stack in float64, whatever entries lie in it."""
        ...


@dataclass(frozen=True)
class Mean:
    """Element-wise weighted mean: x = sum_k p_k x_k."""

    def __call__(self, old: Tree, clients: Tree, weights: Tensor, memory: Tree) -> tuple[Tree, Tree]:
        return {part: self.joined(clients[part], weights).to(value) for part, value in old.items()}, memory

    def joined(self, stack: Tensor, weights: Tensor) -> Tensor:
        return weighted_sum(stack, weights)


@dataclass(frozen=True)
class Maximum:
    """Element-wise maximum, for counters: no order, no weights, no change of type."""

    def __call__(self, old: Tree, clients: Tree, weights: Tensor, memory: Tree) -> tuple[Tree, Tree]:
        return {part: largest(clients[part]) for part in old}, memory
