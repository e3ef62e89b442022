"""Model surgery: small functions that change a model's layers, found by type, and say what they did.

A surgery works on the model it is given, so pass a private copy; it returns the model, whose root may be a new one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.lazy import LazyModuleMixin

from fednorm.errors import ConfigError
from fednorm.layers.keyed import KeyedDropout, number_keyed_layers
from fednorm.layers.sample_norms import InstanceNorm, PixelLayerNorm


@dataclass(frozen=True)
class SurgeryReport:
    """How many layers a surgery changed, and one line a finding for the run's log."""

    changed: int
    notes: tuple[str, ...]
    target: str = "BatchNorm layer"
    """What the surgery looks for, for the error where there is none."""


Surgery = Callable[[nn.Module], tuple[nn.Module, SurgeryReport]]
MakeNorm = Callable[[str, _BatchNorm], nn.Module]


def substitute(
    model: nn.Module, predicate: Callable[[nn.Module], bool], make: Callable[[str, nn.Module], nn.Module]
) -> tuple[nn.Module, list[tuple[nn.Module, nn.Module]]]:
    """Replace every module the predicate accepts; return the root and the pairs (old, new).

    A module that hangs in several places is made once and stays shared. A replacement is not searched again, so it may
    hold what it replaces.
    """
    done: dict[nn.Module, nn.Module] = {}
    pairs: list[tuple[nn.Module, nn.Module]] = []

    def visit(name: str, module: nn.Module) -> nn.Module:
        if module in done:
            return done[module]
        if predicate(module):
            new = make(name or "(root)", module)
            pairs.append((module, new))
            done[module] = done[new] = new
            return new
        done[module] = module
        for child_name, child in module._modules.items():  # named_children() would list a shared child only once
            if child is not None:
                module._modules[child_name] = visit(f"{name}.{child_name}" if name else child_name, child)
        return module

    return visit("", model), pairs


def replace_modules(
    predicate: Callable[[nn.Module], bool], make: Callable[[str, nn.Module], nn.Module], note: str
) -> Surgery:
    """A surgery that replaces modules one by one; `{count}` in the note becomes their number.

    >>> silence = replace_modules(lambda m: isinstance(m, nn.ReLU), lambda name, m: nn.Identity(), "{count} removed")
    >>> silence(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))[1].notes
    ('1 removed',)
    """

    def operate(model: nn.Module) -> tuple[nn.Module, SurgeryReport]:
        model, pairs = substitute(model, predicate, make)
        return model, SurgeryReport(len(pairs), (note.format(count=len(pairs)),) if pairs else ())

    return operate


def _is_batch_norm(module: nn.Module) -> bool:
    """True for BatchNorm1d/2d/3d, SyncBatchNorm and what derives from them."""
    return isinstance(module, _BatchNorm)


def swap_norm(make: MakeNorm, label: Callable[[nn.Module], str] | str, keep_statistics: bool = True) -> Surgery:
    """Replace every BatchNorm; what fits by name and shape moves over, with dtype, device and mode.

    Parameters move as objects, so a gamma that two layers tie stays tied.
    """

    def swap(name: str, module: nn.Module) -> nn.Module:
        old = cast(_BatchNorm, module)
        if isinstance(old, LazyModuleMixin):
            raise ConfigError(f"layer '{name}' has no shape yet (a lazy module); run one forward pass before surgery")
        new = make(name, old)
        _move_tensors(old, new, keep_statistics)
        _keep_fused_tail(name, old, new)
        return new.train(old.training)

    def operate(model: nn.Module) -> tuple[nn.Module, SurgeryReport]:
        model, pairs = substitute(model, _is_batch_norm, swap)
        if not pairs:
            return model, SurgeryReport(0, ())
        names = Counter(label if isinstance(label, str) else label(new) for _, new in pairs)
        became = ", ".join(name if len(names) == 1 else f"{name} x{count}" for name, count in names.items())
        plural = "s" if len(pairs) > 1 else ""
        return model, SurgeryReport(
            len(pairs), (f"{len(pairs)} BatchNorm layer{plural} became {became}: {_fate(pairs, keep_statistics)}",)
        )

    return operate


def _move_tensors(old: nn.Module, new: nn.Module, keep_statistics: bool) -> None:
    tensors = [t for t in (*old._parameters.values(), *old._buffers.values()) if t is not None]
    if tensors:
        new.to(device=tensors[0].device, dtype=next((t.dtype for t in tensors if t.is_floating_point()), None))
    for part, tensor in old._parameters.items():
        # A layer may have gamma without beta (torch 2.13); then its successor must not invent one.
        if part in new._parameters and (tensor is None or _has_place(new._parameters[part], tensor)):
            new._parameters[part] = tensor
    for part, tensor in old._buffers.items():
        if keep_statistics and tensor is not None and _has_place(new._buffers.get(part), tensor):
            new._buffers[part] = tensor


def _has_place(slot: Tensor | None, tensor: Tensor) -> bool:
    return slot is not None and slot.shape == tensor.shape


def _fate(pairs: list[tuple[nn.Module, nn.Module]], keep_statistics: bool) -> str:
    """What the old layers' tensors became, such as 'affine kept, running statistics dropped'."""
    fates = []
    for word, part, wanted in (("affine", "weight", True), ("running statistics", "running_mean", keep_statistics)):
        holders = [new for old, new in pairs if getattr(old, part) is not None]
        if holders:
            kept = wanted and all(getattr(new, part, None) is not None for new in holders)
            fates.append(f"{word} {'kept' if kept else 'dropped'}")
    return ", ".join(fates) or "nothing to keep"


def _run_tail(module: nn.Module, args: object, output: Tensor) -> Tensor:
    return cast(nn.Module, module.tail)(output)


def _keep_fused_tail(name: str, old: nn.Module, new: nn.Module) -> None:
    """Some libraries fuse dropout and activation into their BatchNorm; losing them would change the network."""
    children = [child for child in old.children() if not isinstance(child, nn.Identity)]
    if not children:
        return
    # timm's class (which we do not import) runs its children in their order after the normalization.
    if not any(cls.__name__ == "BatchNormAct2d" for cls in type(old).__mro__):
        raise ConfigError(
            f"layer '{name}' ({type(old).__name__}) is a BatchNorm with layers of its own inside, whose order is not "
            "known; write it as a BatchNorm followed by these layers"
        )
    new.add_module("tail", nn.Sequential(*children))
    new.register_forward_hook(_run_tail)


def largest_divisor(number: int, bound: int) -> int:
    """The largest divisor of `number` that is not above `bound`.

    >>> largest_divisor(12, 5)
    4
    """
    return next(d for d in range(min(bound, number), 0, -1) if number % d == 0)


def group_norm(groups: int = 2) -> Surgery:
    """BatchNorm becomes GroupNorm; a channel count that `groups` does not divide gets its largest divisor below.

    >>> model = nn.Sequential(nn.BatchNorm2d(8), nn.BatchNorm2d(9))
    >>> group_norm(4)(model)[1].notes[0]
    '2 BatchNorm layers became GroupNorm(4) x1, GroupNorm(3) x1: affine kept, running statistics dropped'
    """
    if groups < 1:
        raise ConfigError(f"group norm with {groups} groups cannot work; give a number of groups of at least 1")

    def make(name: str, old: _BatchNorm) -> nn.Module:
        return nn.GroupNorm(largest_divisor(old.num_features, groups), old.num_features, affine=old.affine)

    return swap_norm(make, lambda new: f"GroupNorm({cast(nn.GroupNorm, new).num_groups})")


def layer_norm() -> Surgery:
    """BatchNorm becomes LayerNorm over (C, H, W), or over C on vectors, with the affine per channel.

    GroupNorm with one group is both: on (N, C) its statistics run over C alone.
    """
    return swap_norm(lambda name, old: nn.GroupNorm(1, old.num_features, affine=old.affine), "LayerNorm")


def layer_norm_pixel() -> Surgery:
    """BatchNorm becomes LayerNorm over the channels of each pixel, as in ConvNeXt."""
    return swap_norm(
        lambda name, old: PixelLayerNorm(old.num_features, elementwise_affine=old.affine), "LayerNorm per pixel"
    )


def instance_norm() -> Surgery:
    """BatchNorm becomes InstanceNorm without running statistics; vectors get LayerNorm."""
    return swap_norm(lambda name, old: InstanceNorm(old.num_features, old.affine, name), "InstanceNorm")


_DROPOUTS: dict[type[_DropoutNd], int] = {nn.Dropout: 0, nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}


def _dropout_axes(module: nn.Module) -> int | None:
    for cls, spatial in _DROPOUTS.items():
        if isinstance(module, cls) and type(module).forward is cls.forward:
            return spatial
    return None


def _refuse_hidden_randomness(model: nn.Module) -> None:
    """Layers that draw from torch's hidden generator in a way no key can replace."""
    for name, module in model.named_modules():
        draws = (
            (isinstance(module, nn.MultiheadAttention) and module.dropout > 0)
            or (isinstance(module, nn.RNNBase) and module.dropout > 0 and module.num_layers > 1)
            or (isinstance(module, _DropoutNd) and module.p > 0 and _dropout_axes(module) is None)
            or isinstance(module, nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d)
        )
        if draws:
            raise ConfigError(
                f"layer '{name or '(root)'}' ({type(module).__name__}) draws random numbers that cannot be keyed; "
                "set its dropout to 0 or use nn.Dropout in its place"
            )


def key_dropout(model: nn.Module) -> tuple[nn.Module, SurgeryReport]:
    """Replace nn.Dropout and its channel-wise kin by `KeyedDropout`; refuse layers whose randomness is out of reach."""
    _refuse_hidden_randomness(model)

    def make(name: str, module: nn.Module) -> nn.Module:
        old = cast(_DropoutNd, module)
        return KeyedDropout(old.p, _dropout_axes(old) or 0).train(old.training)

    replace = replace_modules(lambda m: _dropout_axes(m) is not None, make, "{count} dropout layers draw keyed masks")
    model, report = replace(model)
    number_keyed_layers(model)
    return model, report
