"""A stacked step as one CUDA graph: gather, augmentation, forward, backward and update in a single launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fednorm.client import Step
from fednorm.engines.base import Trees
from fednorm.plan import Plan
from fednorm.state import Tree

_WARM_UP = 3  # torch's advice before a capture: libraries choose and allocate on their first calls


class GraphedStep:
    """A step over tensors that stay where they are; a replay reads rows, keys and numbers that were written before."""

    def __init__(self, plan: Plan, step: Step, stack: Trees, rows: Tensor, keys: Tensor, numbers: dict[str, float]):
        device = plan.device
        self.trees = [{key: value.clone() for key, value in tree.items()} for tree in _parts(stack)]
        self.anchor = {key: value.clone() for key, value in stack.params.items()}
        self.rows, self.keys = rows.to(device), keys.to(device)
        dtype = next(iter(stack.params.values())).dtype
        self.numbers = {name: torch.tensor(value, dtype=dtype, device=device) for name, value in numbers.items()}
        self.loss = torch.zeros(len(rows), dtype=dtype, device=device)
        self._plan, self._step = plan, step
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                self._body()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._body()

    def _body(self) -> None:
        params, rest, buffers = self.trees
        x, y = self._plan.batches.gather(self.rows, self.keys)
        out = self._step(params, rest, buffers, self.anchor, x, y, self.keys, self.numbers)
        for kept, new in zip(self.trees, (out.params, out.rest, out.buffers), strict=True):
            _copy_into(kept, new)
        self.loss.copy_(out.loss)

    def load(self, stack: Trees, numbers: dict[str, float]) -> None:
        """Start a round: the stack's values, and its parameters as the ones the server sent."""
        for kept, new in zip(self.trees, _parts(stack), strict=True):
            _copy_into(kept, new)
        _copy_into(self.anchor, stack.params)
        for name, value in numbers.items():
            self.numbers[name].fill_(value)

    def run(self, rows: Tensor, keys: Tensor) -> Tensor:
        """One step on these batches; returns the clients' losses, still on the device."""
        self.rows.copy_(rows)
        self.keys.copy_(keys)
        self.graph.replay()
        return self.loss.clone()

    def result(self) -> Trees:
        """The stack as it stands, copied, since the next round writes over it."""
        params, rest, buffers = ({key: value.clone() for key, value in tree.items()} for tree in self.trees)
        return Trees(params, rest, buffers)


def _parts(stack: Trees) -> Sequence[Tree]:
    return stack.params, stack.rest, stack.buffers


def _copy_into(kept: Tree, new: Tree) -> None:
    if kept.keys() != new.keys():
        raise RuntimeError(f"the step makes new state: {', '.join(sorted(kept.keys() ^ new.keys()))}")
    pairs = [(kept[key], new[key]) for key in kept if kept[key].data_ptr() != new[key].data_ptr()]
    if pairs:
        olds, news = zip(*pairs, strict=True)
        torch._foreach_copy_(olds, news)  # pyright: ignore[reportPrivateImportUsage]
