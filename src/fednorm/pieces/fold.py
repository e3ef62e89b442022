"""Folding for inference: the same function with fewer layers.

Standardised weights become plain ones. A BatchNorm goes into the layer before it where a symbolic trace proves that
nothing else reads that layer's output.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import cast

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from fednorm.core.surgery import SurgeryReport
from fednorm.errors import ConfigError
from fednorm.layers.batch_stats import RunningNorm
from fednorm.layers.rebuild import rebuild_conv
from fednorm.layers.static_bn import StaticBN
from fednorm.layers.swapping import substitute
from fednorm.layers.tracing import LayerTracer
from fednorm.layers.ws_conv import WSConv2d


class VectorsOnly(nn.Module):
    """Stands where a BatchNorm was folded into a linear layer, which is right for inputs (N, C) alone."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 2:
            raise ConfigError(f"this model was folded for vectors (N, C) here, but got {x.dim()} axes; use it unfolded")
        return x


def fold(model: nn.Module) -> nn.Module:
    """A copy of the model for inference, with equal outputs and with every layer folded that safely can be."""
    return fold_with_report(model)[0]


def fold_with_report(model: nn.Module) -> tuple[nn.Module, SurgeryReport]:
    """As `fold`, and a report that names the BatchNorm layers that stay, and why."""
    model = copy.deepcopy(model).eval()
    model, standardised = substitute(model, lambda m: isinstance(m, WSConv2d), _plain_conv)
    notes = [f"{len(standardised)} standardised convolutions became plain"] if standardised else []
    norms = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    if not norms:
        return model, SurgeryReport(len(standardised), tuple(notes))
    try:
        graph = LayerTracer().trace(model)
    except Exception as reason:  # tracing runs the model's own code, which may raise anything
        notes.append(f"{len(norms)} BatchNorm layers stay: the model cannot be traced ({type(reason).__name__})")
        return model, SurgeryReport(len(standardised), tuple(notes))
    folded = _fold_pairs(model, graph)
    if folded:
        notes.append(f"{len(folded)} BatchNorm layers folded into the layer before")
    staying = [name for name in norms if name not in folded]
    if staying:
        notes.append(f"BatchNorm stays, no layer before it is provably its own: {', '.join(staying)}")
    return model, SurgeryReport(len(standardised) + len(folded), tuple(notes))


def _plain_conv(name: str, module: nn.Module) -> nn.Module:
    old = cast(WSConv2d, module)
    new = rebuild_conv(nn.Conv2d, old)
    new.weight = nn.Parameter(old.standardised_weight().detach(), requires_grad=old.weight.requires_grad)
    return new


def _fold_pairs(model: nn.Module, graph: fx.Graph) -> list[str]:
    """Fold where conv -> norm is an edge that nothing else touches; return the names of the folded norms."""
    named = dict(model.named_modules())
    owners = [str(n.target) if n.op == "call_module" else str(n.target).rpartition(".")[0] for n in graph.nodes]
    reads = Counter(
        id(named.get(owner))
        for owner, n in zip(owners, graph.nodes, strict=True)
        if n.op in ("call_module", "get_attr")
    )
    folded: list[str] = []
    for node in graph.nodes:
        source = node.args[0] if node.op == "call_module" and node.args else None
        if not isinstance(source, fx.Node) or source.op != "call_module" or len(source.users) != 1:
            continue
        norm, layer = named[str(node.target)], named[str(source.target)]
        if reads[id(norm)] != 1 or reads[id(layer)] != 1 or not _is_plain_norm(norm) or _hooked(norm) or _hooked(layer):
            continue
        if type(layer) in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
            fused, rest = fuse_conv_bn_eval(cast(nn.Conv2d, layer), cast(_BatchNorm, norm)), nn.Identity()
        elif type(layer) is nn.Linear:
            fused, rest = fuse_linear_bn_eval(layer, cast(_BatchNorm, norm)), VectorsOnly()
        else:
            continue
        new = {layer: fused, norm: rest}
        # By identity, since a module may hang under a second name, the one that the model's code uses.
        substitute(model, new.__contains__, lambda name, old, new=new: new[old])
        folded.append(str(node.target))
    return folded


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _is_plain_norm(module: nn.Module) -> bool:
    """True where evaluation is nothing but running statistics and affine."""
    if not isinstance(module, _BatchNorm) or module.running_mean is None:
        return False
    if isinstance(module, StaticBN):
        return bool(torch.count_nonzero(module.num_batches_tracked))
    return isinstance(module, RunningNorm) or type(module).forward in (nn.BatchNorm2d.forward, nn.SyncBatchNorm.forward)
