"""Programs are traced to what torch's own tracer would write down, by less work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functionalize
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only

import tiny
from fednorm.engines.stack.kernels.layers import use_kernels
from fednorm.engines.stack.slot import StackSlot
from fednorm.engines.stack.tracing import trace
from fednorm.running.run import Run
from fednorm.running.store import Store

_ALIAS, _DETACH = torch.ops.aten.alias.default, torch.ops.aten.detach.default


def by_torch(function: Callable[..., Any], *examples: Any) -> GraphModule:
    """What torch's own tracer makes of a function, without what is written back into its inputs."""
    fake = make_fx(functionalize(lambda *args: function(*args)), tracing_mode="fake", _allow_non_fake_inputs=True)
    traced = fake(*examples)
    for node in list(traced.graph.nodes):
        if node.target is torch.ops.aten.copy_.default:
            traced.graph.erase_node(node)
    traced.graph.eliminate_dead_code()
    return traced


def told(traced: GraphModule) -> list[Any]:
    """Every node of a graph, with others by their number and constants by what they are."""
    numbers = {node: number for number, node in enumerate(traced.graph.nodes)}

    def line(node: Node) -> Any:
        if node.op == "get_attr":
            return "constant", id(getattr(traced, str(node.target)))
        target = node.target if node.op == "call_function" else node.op
        target = _ALIAS if target is _DETACH else target  # as torch 2.15 writes it, and earlier ones do not
        return target, *(tree_map_only(Node, numbers.__getitem__, part) for part in (node.args, node.kwargs))

    # A placeholder's arguments would be its default.
    return [(node.op,) if node.op == "placeholder" else line(node) for node in traced.graph.nodes]


@pytest.mark.parametrize("kernels", [True, False], ids=["stack operators", "torch's own"])
@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedbn", "fedadam", "gn", "fedwon"])
def test_rounds_are_traced_as_torch_traces_them(method: str, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fednorm.engines.stack.slot.DEVICES", {"cpu"})
    changes = {"data": tiny.federation((8, 8, 8)), "rounds": 1, "train__local_steps": 1, "train__augment": "flip"}
    plan = tiny.plan(method, engine__name="stacked", **changes)
    if kernels:
        assert use_kernels(plan.prepared.model)
    run = Run(plan, Store())
    list(run.rounds())
    assert isinstance(run.server.held, StackSlot)
    (exchange,) = run.server.held.stack._programs.values()
    ours, torchs = (how(exchange._round, exchange._state) for how in (trace, by_torch))
    assert told(ours) == told(torchs)
    assert [looks(node) for node in ours.graph.nodes] == [looks(node) for node in torchs.graph.nodes]


def looks(node: Node) -> Any:
    """The shape, strides and type of what a node is an example of."""
    if node.op == "get_attr":  # which torch's tracer does not note
        return None
    return tree_map_only(Tensor, lambda each: (each.shape, each.stride(), each.dtype), node.meta.get("val"))


def test_a_traced_function_gives_what_the_function_gives() -> None:
    """Views, several results, constants of its own, changes in place, results that are inputs."""
    scale = torch.tensor([2.0, 3.0, 5.0])

    def function(state: dict[str, Tensor], other: Tensor) -> tuple[dict[str, Tensor], list[Tensor]]:
        mine = state["a"].clone()
        mine[0] += other
        top, where = (mine * scale).topk(2)
        return {"top": top, "same": state["b"], "sum": nn.functional.relu(mine.t()[1] - 4).sum()}, [where, scale]

    state = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}
    traced = trace(function, state, torch.ones(3))
    other = {"a": torch.tensor([[3.0, 1.0, 2.0], [9.0, 8.0, 7.0]]), "b": torch.zeros(2)}
    found, expected = (each(other, torch.tensor([1.0, 2.0, 3.0])) for each in (traced, function))
    assert found[0].keys() == expected[0].keys()
    assert all(torch.equal(found[0][key], value) for key, value in expected[0].items())
    assert all(map(torch.equal, found[1], expected[1]))
    assert torch.equal(state["a"], torch.arange(6.0).view(2, 3))


def test_a_function_that_looks_at_values_cannot_be_traced() -> None:
    with pytest.raises(Exception, match="_local_scalar_dense"):
        trace(lambda x: x + 1 if x.sum() > 0 else x, torch.ones(3))
