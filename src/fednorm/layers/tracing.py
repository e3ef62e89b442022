"""What a symbolic trace of a model tells surgery: which layers feed which."""

from __future__ import annotations

from torch import fx, nn
from torch.nn.modules import activation

_WEIGHTED = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
_ACTIVATIONS = frozenset(
    {"relu", "relu6", "leaky_relu", "elu", "selu", "gelu", "silu", "mish", "hardswish", "sigmoid", "tanh"}
)
"""Functions and methods of tensors; layers are known by their type."""


class LayerTracer(fx.Tracer):
    """A tracer that takes the layers of this package for what they are, as it does torch's own."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        own = type(m).__module__.startswith("fednorm.layers")
        return (own and not list(m.children())) or super().is_leaf_module(m, module_qualified_name)


def behind_linear_outputs(model: nn.Module) -> set[nn.Module]:
    """The convolutions that see the output of another layer which no activation came after.

    MobileNetV2's blocks end so; in a ResNet there is none. A layer is one of them if that is so wherever it is used.
    Tracing runs the model's own code, which may raise anything.
    """
    graph = LayerTracer().trace(model)
    named = dict(model.named_modules())
    linear: dict[fx.Node, bool] = {}
    behind: dict[nn.Module, bool] = {}
    for node in graph.nodes:
        sources = node.all_input_nodes
        module = named[str(node.target)] if node.op == "call_module" else None
        if isinstance(module, nn.Conv2d):
            behind[module] = behind.get(module, True) and any(linear[source] for source in sources)
        if isinstance(module, _WEIGHTED):
            linear[node] = True
        else:
            linear[node] = not _activates(node, module) and any(linear[source] for source in sources)
    return {module for module, found in behind.items() if found}


def _activates(node: fx.Node, module: nn.Module | None) -> bool:
    if module is not None:
        return type(module).__module__ == activation.__name__
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op != "placeholder" and name.rstrip("_") in _ACTIVATIONS
