"""What a model's state consists of, decided by the type of the module that owns each entry.

Names lie: torchvision calls a BatchNorm `downsample.1`, MobileNet numbers its layers, and a user may call anything
`subnet`. So no rule here reads a name; the one that does, `kinds_by_name`, is for bare state dicts without a module.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase  # pyright: ignore[reportPrivateUsage]
from torch.nn.parameter import is_lazy

from fednorm.errors import ConfigError

Tree = dict[str, Tensor]
"""A flat mapping from state-dict keys to tensors; the only currency between the parts of fednorm."""


class Kind(StrEnum):
    """What an entry of the state is."""

    WEIGHT = "weight"
    AFFINE = "affine"
    STATISTIC = "statistic"
    COUNTER = "counter"
    OPTIMIZER = "optimizer"
    EXTRA = "extra"


class Policy(StrEnum):
    """What happens to an entry between client and server."""

    SHARED = "shared"
    LOCAL = "local"
    FROZEN = "frozen"
    FRESH = "fresh"
    REPORTED = "reported"
    DROPPED = "dropped"


@dataclass(frozen=True)
class Entry:
    """One tensor of a model's state: its key, its kind, the layer that owns it and its part in that layer."""

    key: str
    kind: Kind
    layer: str
    part: str
    trainable: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_norm: bool = False
    """True in layers that normalise with statistics of the batch: only their affine is what FedBN keeps local."""
    idle: bool = False
    """True where no output of the model depends on it: it was only watched."""
    extra: str = ""
    """The name a method declares this entry under, where it is not the model's or the optimizer's."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.size * self.dtype.itemsize


_RUNNING = {"running_mean": Kind.STATISTIC, "running_var": Kind.STATISTIC, "num_batches_tracked": Kind.COUNTER}
_AFFINE = {"weight": Kind.AFFINE, "bias": Kind.AFFINE}


@dataclass(frozen=True)
class _Norm:
    """What a type of normalization layer declares about its tensors."""

    kinds: Mapping[str, Kind]
    batch: bool = False
    idle: bool = False


_NORM_TYPES: dict[type[nn.Module], _Norm] = {
    _BatchNorm: _Norm(_AFFINE | _RUNNING, batch=True),
    _NormBase: _Norm(_AFFINE | _RUNNING),  # instance norms
    nn.GroupNorm: _Norm(_AFFINE),
    nn.LayerNorm: _Norm(_AFFINE),
    nn.RMSNorm: _Norm(_AFFINE),
}
# Libraries we do not import define these as plain modules whose four tensors are buffers.
_NORM_TYPE_NAMES = dict.fromkeys(("FrozenBatchNorm2d", "FrozenBatchNormAct2d"), _NORM_TYPES[_BatchNorm])
_NO_NORM = _Norm({})


def register_norm(module_type: type[nn.Module], **parts: str) -> None:
    """Declare the kinds of the tensors of a normalization layer that fednorm does not know.

    `register_norm(MyNorm, scale="affine", shift="affine", ema="statistic")` makes every method treat `MyNorm` as it
    treats torch's own layers: with a statistic it counts as a batch normalization, without as a GroupNorm or the like.
    Tensors not named keep the kind they would have had.
    """
    kinds = {part: Kind(kind) for part, kind in parts.items()}
    _NORM_TYPES[module_type] = _Norm(kinds, batch=Kind.STATISTIC in kinds.values())


def register_tracker(module_type: type[nn.Module], **parts: str) -> None:
    """Declare the kinds of the tensors of a layer that takes things down, and whose output depends on none of them.

    Its statistics go with those of batch norms, but nothing that acts on batch norms acts on it.
    """
    _NORM_TYPES[module_type] = _Norm({part: Kind(kind) for part, kind in parts.items()}, idle=True)


def _norm_of(module: nn.Module) -> _Norm:
    for cls in type(module).__mro__:
        if cls in _NORM_TYPES:
            return _NORM_TYPES[cast(type[nn.Module], cls)]
        if cls.__name__ in _NORM_TYPE_NAMES:
            return _NORM_TYPE_NAMES[cls.__name__]
    return _NO_NORM


def is_norm(module: nn.Module) -> bool:
    """True for every type of normalization layer fednorm knows or was told about."""
    return _norm_of(module) is not _NO_NORM and not _norm_of(module).idle


def is_batch_norm(module: nn.Module) -> bool:
    """True for layers that normalise with statistics of the batch."""
    return _norm_of(module).batch


def entries(model: nn.Module) -> tuple[Entry, ...]:
    """Every entry of the model's persistent state, in state-dict order, each tensor once even if modules share it."""
    persistent = model.state_dict(keep_vars=True)
    found: list[Entry] = []
    seen: set[int] = set()
    for layer, module in cast(Iterable[tuple[str, nn.Module]], model.named_modules()):
        norm = _norm_of(module)
        parameters = module._parameters  # pyright: ignore[reportPrivateUsage]
        buffers = module._buffers  # pyright: ignore[reportPrivateUsage]
        for part, tensor in (*parameters.items(), *buffers.items()):
            key = f"{layer}.{part}" if layer else part
            if tensor is None or key not in persistent or id(tensor) in seen:
                continue
            if is_lazy(tensor):
                raise ConfigError(
                    f"'{key}' has no shape yet (a lazy module); run one forward pass before using fednorm"
                )
            seen.add(id(tensor))
            trainable = isinstance(tensor, nn.Parameter) and tensor.requires_grad
            kind = norm.kinds.get(part) or _kind_outside_norms(tensor)
            shape = tuple(tensor.shape)
            found.append(Entry(key, kind, layer, part, trainable, shape, tensor.dtype, norm.batch, norm.idle))
    return tuple(found)


def _kind_outside_norms(tensor: Tensor) -> Kind:
    if isinstance(tensor, nn.Parameter):
        return Kind.WEIGHT
    return Kind.EXTRA if tensor.is_floating_point() else Kind.COUNTER


def kinds_by_name(keys: Iterable[str]) -> dict[str, Kind]:
    """Guess kinds from the names of a bare state dict, for files whose module is not at hand.

    A layer is a BatchNorm if it owns a `running_mean`; then its weight and bias are its affine. Norms without
    statistics cannot be told from linear layers this way and count as weights: give the module where you can.

    >>> {key: kind.value for key, kind in kinds_by_name(["a.1.weight", "a.1.running_mean", "b.weight"]).items()}
    {'a.1.weight': 'affine', 'a.1.running_mean': 'statistic', 'b.weight': 'weight'}
    """
    keys = list(keys)
    norms = {key.rpartition(".")[0] for key in keys if key.rpartition(".")[2] == "running_mean"}
    declared = _AFFINE | _RUNNING
    return {
        key: declared.get(part, Kind.WEIGHT) if layer in norms else Kind.WEIGHT
        for key in keys
        for layer, _, part in [key.rpartition(".")]
    }


def kinds(model: nn.Module) -> dict[str, Kind]:
    """Key to kind, for a model."""
    return {entry.key: entry.kind for entry in entries(model)}


def model_state(model: nn.Module, listing: Iterable[Entry] | None = None) -> Tree:
    """A detached copy of the model's state, keyed as `entries` lists it."""
    tensors = model.state_dict()
    return {entry.key: tensors[entry.key].detach().clone() for entry in listing or entries(model)}


def named(prefix: str, tree: Mapping[str, Tensor]) -> Tree:
    """Entries of a tree inside a larger one, by a prefix that tells that they belong together.

    >>> both = named("old", {"weight": torch.zeros(1)}) | named("new", {"weight": torch.ones(1)})
    >>> list(both), list(unnamed("new", both))
    (['old:weight', 'new:weight'], ['weight'])
    """
    return {f"{prefix}:{name}": value for name, value in tree.items()}


def unnamed(prefix: str, tree: Mapping[str, Tensor]) -> Tree:
    """The entries that `named` gave this prefix."""
    start = f"{prefix}:"
    return {key.removeprefix(start): value for key, value in tree.items() if key.startswith(start)}


def tree_bytes(tree: Mapping[str, Tensor]) -> int:
    """Bytes of the tensors' contents, which is what a payload costs on the wire."""
    return sum(tensor.nbytes for tensor in tree.values())


def digest(tree: Mapping[str, Tensor]) -> str:
    """A hash of names, types, shapes and bits: equal digests mean equal state."""
    sha = hashlib.sha256()
    for key in sorted(tree):
        tensor = tree[key].detach().cpu().contiguous()
        sha.update(f"{key}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()
