"""Weights that steps read rounded: an update writes them so as well, so that they are not rounded anew in each step."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor
from torch.fx import GraphModule

from fednorm.core.state import Tree
from fednorm.engines.stack.in_place import IN_PLACE, read_elsewhere
from fednorm.engines.stack.kernels.element_ops import round_into
from fednorm.engines.stack.row_matrix import aligned_like
from fednorm.engines.stack.tracing import add_entry


class Rounded:
    """Rounded weights of a program: entries of its state by their names, each with the one it is made from."""

    def __init__(self, traced: GraphModule, state: Tree, written: Collection[str]) -> None:
        """Change a program that writes some entries in place, where it rounds one before it moves it."""
        self._made: dict[str, tuple[Tensor, Tensor]] = {}
        graph = traced.graph
        entries = dict(zip(state, graph.find_nodes(op="placeholder"), strict=True))
        for key in written:
            readers = [node for node in entries[key].users if node.target is torch.ops.fednorm.narrowed.default]
            update = next(node for node in entries[key].users if node.target in IN_PLACE)
            # An update of something else may read this entry too, as a gradient.
            if len(readers) != 1 or update.args[0] is not entries[key] or read_elsewhere(update, readers[0]):
                continue
            name = f"rounded {key}"
            self._made[name] = aligned_like(state[key], readers[0].args[1]), state[key]
            kept = add_entry(traced, {**state, **self.entries})
            readers[0].replace_all_uses_with(kept)
            graph.erase_node(readers[0])
            update.args = (*update.args[:-1], kept)
        if self._made:
            traced.recompile()

    @property
    def entries(self) -> Tree:
        return {name: rounded for name, (rounded, _) in self._made.items()}

    def renew(self) -> None:
        """Round what was written by others than the program's own updates."""
        for rounded, value in self._made.values():
            round_into(rounded, value)
