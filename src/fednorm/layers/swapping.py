"""Tools of model surgery: replace modules one by one, or every BatchNorm with what fits of its tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, cast

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.lazy import LazyModuleMixin

from fednorm.core.surgery import SurgeryReport
from fednorm.errors import ConfigError
from fednorm.layers.batch_stats import RunningNorm


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


def _is_batch_norm(module: nn.Module) -> bool:
    """True for BatchNorm1d/2d/3d, SyncBatchNorm and what derives from them."""
    return isinstance(module, _BatchNorm)


def swap_norms(
    model: nn.Module,
    make: Callable[[str, _BatchNorm], nn.Module],
    label: Callable[[nn.Module], str],
    keep_statistics: bool = True,
) -> tuple[nn.Module, SurgeryReport]:
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

    model, pairs = substitute(model, _is_batch_norm, swap)
    if not pairs:
        return model, SurgeryReport(0, ())
    names = Counter(label(new) for _, new in pairs)
    became = ", ".join(name if len(names) == 1 else f"{name} x{count}" for name, count in names.items())
    plural = "s" if len(pairs) > 1 else ""
    return model, SurgeryReport(
        len(pairs), (f"{len(pairs)} BatchNorm layer{plural} became {became}: {_fate(pairs, keep_statistics)}",)
    )


@dataclass(frozen=True)
class SwapNorm(ABC):
    """A surgery that replaces every BatchNorm by what `make` makes of it (`swap_norms`)."""

    keep_statistics: ClassVar[bool] = True

    @abstractmethod
    def make(self, name: str, old: _BatchNorm) -> nn.Module:
        """The layer that takes the place of the old one."""

    @abstractmethod
    def label(self, new: nn.Module) -> str:
        """What the new layer is called in the report."""

    def __call__(self, model: nn.Module) -> tuple[nn.Module, SurgeryReport]:
        return swap_norms(model, self.make, self.label, self.keep_statistics)


class SwapByClass(SwapNorm):
    """A surgery that replaces every BatchNorm by a layer of one class with the old one's settings."""

    layer: ClassVar[type[RunningNorm]]

    def make(self, name: str, old: _BatchNorm) -> nn.Module:
        return self.layer.like(old)

    def label(self, new: nn.Module) -> str:
        return self.layer.__name__


def _move_tensors(old: nn.Module, new: nn.Module, keep_statistics: bool) -> None:
    tensors = [t for t in (*old._parameters.values(), *old._buffers.values()) if t is not None]
    if tensors:
        new.to(device=tensors[0].device, dtype=next((t.dtype for t in tensors if t.is_floating_point()), None))
    for part, tensor in old._parameters.items():
        # A layer may have gamma without beta (torch 2.13); then its successor must not invent one.
        if part in new._parameters and (tensor is None or _fits(new._parameters[part], tensor)):
            new._parameters[part] = tensor
    for part, tensor in old._buffers.items():
        if keep_statistics and tensor is not None and _fits(new._buffers.get(part), tensor):
            new._buffers[part] = tensor


def _fits(old: Tensor | None, tensor: Tensor) -> bool:
    return old is not None and old.shape == tensor.shape


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
