"""A function of tensors as a graph of operators, written down while it is played on tensors without numbers.

Torch's own `make_fx` gives the same graphs and follows much more, such as shapes that vary, but takes half as long
again (ResNet20 on a CPU: 1.9 s for 1.2), and a run waits for it before its first row.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functionalize
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo  # pyright: ignore[reportPrivateUsage]
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from fednorm.core.state import Tree

_COPY, _DEVICE = torch.ops.aten.copy_.default, torch.ops.prim.device.default


def trace(function: Callable[..., Any], *examples: Any) -> GraphModule:
    """A function of tensors as a graph of operators without changes in place, for tensors shaped as the examples."""
    # Fake tensors: nothing runs, so kernels that fusion replaces are not even compiled.
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    writer = _Writer()
    given, in_spec = tree_flatten(examples)
    args = [writer.placeholder(f"arg{number}", fake.from_tensor(each)) for number, each in enumerate(given)]
    with fake, writer:
        # The lambda, because what is given may be a method, whose arguments are miscounted.
        result = functionalize(lambda *args: function(*args))(*tree_unflatten(args, in_spec))
    found, out_spec = tree_flatten(result)
    writer.graph.output([writer.named(each) for each in found])
    names = [f"state{number}" for number in range(len(examples))]
    writer.graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(names, in_spec, out_spec)))
    writer.graph.eliminate_dead_code()
    return GraphModule(writer.constants, writer.graph)


def add_entry(traced: GraphModule, state: Tree) -> Node:
    """Let a traced function of a state know of an entry that was added as its last one."""
    graph = traced.graph
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        node = graph.placeholder(f"added{len(state)}")
    node.meta["val"] = FakeTensorMode().from_tensor(list(state.values())[-1])
    info = graph._codegen.pytree_info  # type: ignore[attr-defined]
    graph.set_codegen(_PyTreeCodeGen(info._replace(in_spec=tree_flatten((state,))[1])))
    return node


class _Writer(TorchDispatchMode):
    """Writes down every operator that is called below it, and with which results of those before."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = Graph()
        self.constants = nn.Module()
        """tensors with numbers that the function takes from elsewhere, such as the data set"""
        self._nodes: dict[int, Node] = {}
        self._held: list[Tensor] = []
        """all that was named, since another tensor could be given the identity of one that is gone"""

    def placeholder(self, name: str, value: Tensor) -> Tensor:
        self._name(value, self.graph.placeholder(name))
        return value

    def named(self, value: Any) -> Any:
        """The node that stands for a tensor; anything else as it is."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._nodes:
            if isinstance(value, FakeTensor):
                raise RuntimeError(f"a tensor of shape {tuple(value.shape)} came from no operator")
            name = f"constant{len(self._held)}"
            self.constants.register_buffer(name, value)
            node = self.graph.get_attr(name)
            self._name(value, node)
        return self._nodes[id(value)]

    def _name(self, value: Tensor, node: Node) -> None:
        node.meta["val"] = value
        self._nodes[id(value)] = node
        self._held.append(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # asked more often than anything else
            return args[0].device
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is _COPY:  # what the function changed in its inputs; callers read what it returns
            return result
        if isinstance(result, Tensor):
            self._name(result, self._call(func, args, kwargs))
        elif isinstance(result, tuple | list) and any(isinstance(each, Tensor) for each in result):
            node = self._call(func, args, kwargs)
            node.meta["val"] = result
            for index, each in enumerate(result):
                if isinstance(each, Tensor):
                    self._name(each, self.graph.call_function(operator.getitem, (node, index)))
        elif func._schema.is_mutable:  # it returns nothing, but has changed something
            self._call(func, args, kwargs)
        return result

    def _call(self, func: Any, args: Any, kwargs: Any) -> Node:
        args, kwargs = tree_map_only(Tensor, self.named, (args, kwargs))
        return self.graph.call_function(func, args, kwargs)
