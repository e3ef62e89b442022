"""A pure function over tensors that stay where they are: on a GPU one launch, a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fednorm.engines.fusion import fuse, trace
from fednorm.state import Tree

_WARM_UP = 2  # torch's advice before a capture: libraries choose and allocate on their first calls


Rows = dict[str, tuple[Tensor, Tensor]]
"""(index, values) of the rows to write into some large tensors."""


class Program:
    """`function` maps a state to new values of some entries, and to rows of others; a call puts them in their places.

    It is traced once, so it must not look at values, and shapes are those of the state it was made with.
    """

    def __init__(self, function: Callable[[Tree], tuple[Tree, Rows]], state: Tree) -> None:
        self._state = state
        self._traced = fuse(trace(function, state))
        self._graph: torch.cuda.CUDAGraph | None = None
        if next(iter(state.values())).is_cuda:
            self._capture()

    def __call__(self) -> None:
        if self._graph is None:
            put(self._state, *self._traced(self._state))
        else:
            self._graph.replay()

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                self._traced(self._state)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            put(self._state, *self._traced(self._state))


@torch.no_grad()
def put(state: Tree, new: Tree, rows: Rows) -> None:
    """Write new values over old ones: rows first, since their index may be an old value."""
    for key, (index, values) in rows.items():
        state[key].index_copy_(0, index, values)
    torch._foreach_copy_([state[key] for key in new], list(new.values()))  # pyright: ignore[reportPrivateImportUsage]
