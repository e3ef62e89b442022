"""A pure function over tensors that stay where they are: on a GPU one launch, a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_map_only

from fednorm.core.state import Tree
from fednorm.engines.machine import usable_cores
from fednorm.engines.stack.compiled import compiled, repays
from fednorm.engines.stack.fusion import fuse
from fednorm.engines.stack.in_place import write_in_place
from fednorm.engines.stack.kernels.element_ops import spread_into
from fednorm.engines.stack.kernels.ops import SIDE_BY_SIDE
from fednorm.engines.stack.rounding import Rounded
from fednorm.engines.stack.tracing import trace

_COMPILERS = min(16, usable_cores())
"""Kernels compiled at a time; most of it is work outside Python."""
_WARM_UP = 2  # torch's advice before a capture: libraries choose and allocate on their first calls


Rows = dict[str, tuple[Tensor, Tensor]]
"""(index, values) of the rows to write into some large tensors."""
Moves = tuple[Tree, Rows]
"""What a program's function returns: new values of some entries, and rows of others."""


class Program:
    """`function` maps a state to new values of some entries, and to rows of others; a call puts them in their places.

    It must not look at values, and shapes are those of the state it was made with. Fusing what can be one kernel makes
    it faster, but takes seconds, most of them for tracing; torch's compiler, for what is then left, takes more, and is
    asked where this many `calls` repay it. Programs that never run at once, and go together, may share `room`.
    """

    def __init__(
        self,
        function: Callable[[Tree], tuple[Tree, Rows]],
        state: Tree,
        fused: bool = True,
        room: GraphRoom | None = None,
        calls: int = 0,
    ) -> None:
        self._state = state
        self._function: Callable[[Tree], Any] = function
        self._in_place: Collection[str] = ()
        self._rounded: Rounded | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        on_gpu = next(iter(state.values())).is_cuda
        if fused:
            traced = fuse(trace(function, state))
            self._in_place = write_in_place(traced, state)
            self._rounded = Rounded(traced, state, self._in_place)
            self._state = {**state, **self._rounded.entries}
            with compile_kernels(traced) if on_gpu else nullcontext():
                joined = compiled(traced, self._state) if on_gpu and repays(traced, calls) else None
            self._function = joined or traced
        if on_gpu:
            self._capture(room or GraphRoom())

    def __call__(self, anew: bool = True) -> None:
        """Play it; `anew` says that others may have written to its state since it was played last."""
        if anew and self._rounded is not None:
            self._rounded.renew()
        if self._graph is None:
            put(self._state, *self._function(self._state))
        else:
            self._graph.replay()

    def _capture(self, room: GraphRoom) -> None:
        # What is written in place is tried on something that lies in memory as the original does.
        others = {key: TensorSpec.of(self._state[key]).zeros() for key in self._in_place}
        playing = torch.cuda.current_stream()
        room.stream.wait_stream(playing)
        with torch.cuda.stream(room.stream):
            for _ in range(_WARM_UP):
                self._function({**self._state, **others})
        playing.wait_stream(room.stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=room.memory, stream=room.stream):
            put(self._state, *self._function(self._state))


class GraphRoom:
    """Where CUDA graphs are captured that never run at once: the memory that they need on their way, and a stream.

    By its stream torch gives products the workspace whose address a graph keeps: graphs that run side by side must not
    have one, and some releases take it from all graphs of a stream once one of them is gone. Kernels of a graph go
    before others as those of the stream did; so it is as urgent as the one on which graphs will be played.
    """

    def __init__(self) -> None:
        self.memory = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(priority=torch.cuda.current_stream().priority)


def calls_of(traced: GraphModule) -> list[tuple[Any, Any]]:
    """The operators of ours in a graph, each with what it is called on: `TensorSpec`s in place of tensors."""
    return [
        (node.target, tree_map_only(Node, _spec_of, (node.args, dict(node.kwargs))))
        for node in traced.graph.nodes
        if str(node.target).startswith("fednorm.")
    ]


@contextmanager
def compile_kernels(traced: GraphModule) -> Iterator[None]:
    """Meanwhile let the kernels of a graph be compiled side by side, by calling each operator once on zeros.

    A kernel that cannot be made like this is made, or complains, when the graph runs; Triton has errors of many types.
    """

    # A thread begins on the first GPU; -1 is none.
    place = torch.cuda.current_device() if torch.cuda.is_available() else -1

    def call(target: Any, specs: Any) -> None:
        SIDE_BY_SIDE.set(True)  # in this thread, which ends with the pool
        with suppress(Exception), torch.cuda.device(place):
            args, kwargs = tree_map_only(TensorSpec, TensorSpec.zeros, specs)
            target(*args, **kwargs)

    with ThreadPoolExecutor(_COMPILERS) as pool:
        for target, specs in {repr(each): each for each in calls_of(traced)}.values():
            pool.submit(call, target, specs)
        yield


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its numbers."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, str(tensor.device))

    def zeros(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device).zero_()


def _spec_of(node: Node) -> TensorSpec | None:
    value = node.meta.get("val")
    return (
        TensorSpec.of(value) if isinstance(value, Tensor) else None
    )  # a call with None fails, and so is left for later


@torch.no_grad()
def put(state: Tree, new: Tree, rows: Rows) -> None:
    """Write new values over old ones: rows first, since their index may be an old value."""
    moved = {key: value for key, value in new.items() if not _is_there(value, state[key])}
    rows = {key: (index, values) for key, (index, values) in rows.items() if not _is_there(values, state[key])}
    written = {state[key].untyped_storage().data_ptr() for key in (*moved, *rows)}

    def apart(value: Tensor) -> Tensor:
        """A part of an old value would change before it is read."""
        return value.clone() if value.untyped_storage().data_ptr() in written else value

    moved = {key: apart(value) for key, value in moved.items()}
    for key, (index, values) in {key: (index, apart(values)) for key, (index, values) in rows.items()}.items():
        state[key].index_copy_(0, index, values)
    for key in [key for key, value in moved.items() if value.dim() == 2 and value.stride(0) == 0 and len(value) > 1]:
        spread_into(state[key], moved.pop(key))
    if moved:
        torch._foreach_copy_([state[key] for key in moved], list(moved.values()))  # pyright: ignore[reportPrivateImportUsage]


def _is_there(value: Tensor, old: Tensor) -> bool:
    """Whether a new value is the old one: of rows, all of them."""
    return value.data_ptr() == old.data_ptr() and value.shape == old.shape and value.stride() == old.stride()
