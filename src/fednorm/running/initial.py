"""Starting from a file: of the model as it is built, or of a run of the same method, whose surgery is done."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fednorm.core.state import Entry, Kind, Tree, entries
from fednorm.errors import CheckpointError
from fednorm.halves.agreed import Agreed
from fednorm.running.tensor_files import load_tree

_LISTED = 5
"""Entries that a note names, before it only counts them."""


@dataclass
class Start:
    """A file to start from, and whether its tensors have found their place."""

    source: str | None
    tree: Tree = field(default_factory=dict)
    partial: bool = False
    _original: tuple[Entry, ...] = ()
    _whole: bool = False
    """whether all of the model was found in the file before surgery"""

    def before_surgery(self, model: nn.Module) -> nn.Module:
        """The model with the file's tensors where they fit it as it was built, for surgery to carry over.

        Unless a part is enough, that is all of them or none: the file may be of the model after surgery.
        """
        if self.source is None:
            return model
        self._original = tuple(entries(model))
        _check_values(self.source, self.tree, self._original)
        fitting = _fitting(self._original, self.tree)
        self._whole = len(fitting) == len(self._original)
        if not fitting or not (self._whole or self.partial):
            return model
        model = copy.deepcopy(model)  # the caller's own model stays as it is
        model.load_state_dict({key: self.tree[key] for key in model.state_dict() if key in fitting}, strict=False)
        return model

    def after_surgery(self, agreed: Agreed) -> Agreed:
        """The same with the file's tensors where they fit the model only after surgery."""
        if self.source is None or self._whole:
            return agreed
        prepared, before = agreed.prepared, _fitting(self._original, self.tree)
        listing = tuple(prepared.entries)
        _check_values(self.source, self.tree, listing)
        fitting = _fitting(listing, self.tree)
        notes = prepared.notes
        if len(fitting) < len(listing):
            if not self.partial:
                raise _refusal(self.source, self.tree, self._original)
            if not (fitting or before):
                raise CheckpointError(f"nothing in '{self.source}' fits the model; give a file with tensors of it")
            told = _told(self.source, self.tree, self._original if len(before) >= len(fitting) else listing)
            notes = (*notes, told)
            fitting = {key: value for key, value in fitting.items() if key not in before}
        state = {entry.key: fitting[entry.key].to(entry.dtype) for entry in listing if entry.key in fitting}
        prepared.model.load_state_dict(state, strict=False)
        return replace(agreed, prepared=replace(prepared, initial={**prepared.initial, **state}, notes=notes))


def read_start(source: str | None, *, partial: bool = False) -> Start:
    """The file a config names, if it names one."""
    return Start(source, load_tree(Path(source)) if source else {}, partial)


def _fitting(listing: Iterable[Entry], tree: Tree) -> Tree:
    return {entry.key: tree[entry.key] for entry in listing if _fits(entry, tree)}


def _fits(entry: Entry, tree: Mapping[str, Tensor]) -> bool:
    return entry.key in tree and tuple(tree[entry.key].shape) == entry.shape


def _check_values(source: str, tree: Tree, listing: Iterable[Entry]) -> None:
    """Refuse numbers that no training can start from."""
    for entry in listing:
        value = tree.get(entry.key)
        if value is None:
            continue
        if _sort(value.dtype) != _sort(entry.dtype):
            raise CheckpointError(
                f"'{source}': '{entry.key}' holds {str(value.dtype).removeprefix('torch.')} numbers, expected "
                f"{str(entry.dtype).removeprefix('torch.')}; give a file with the model's own numbers"
            )
        if not torch.isfinite(value).all():
            raise CheckpointError(f"'{source}': '{entry.key}' holds numbers that are not finite; give another file")
        if _is_never_negative(entry) and (value < 0).any():
            what = "counter" if entry.kind is Kind.COUNTER else "variance"
            raise CheckpointError(f"'{source}': '{entry.key}' is a {what} and holds {value.min()}; give another file")


def _sort(dtype: torch.dtype) -> str:
    """What numbers of a type can be loaded as without loss of their meaning."""
    if dtype.is_complex:
        return "complex"
    return "float" if dtype.is_floating_point else "bool" if dtype is torch.bool else "int"


def _is_never_negative(entry: Entry) -> bool:
    """Variances, and counters of norms; integers elsewhere may be what their module says."""
    return entry.batch_norm and (entry.kind is Kind.COUNTER or entry.part in ("running_var", "running_std"))


def _refusal(source: str, tree: Tree, listing: Iterable[Entry]) -> CheckpointError:
    """Why a file fits the model neither before nor after surgery: the first entry of the model as it was built."""
    entry = next(entry for entry in listing if not _fits(entry, tree))
    partial = "or --init-partial to take what fits"
    if entry.key not in tree:
        return CheckpointError(
            f"'{source}' does not fit the model: it has no '{entry.key}'; give a checkpoint of this model, {partial}"
        )
    return CheckpointError(
        f"'{source}' does not fit the model: '{entry.key}' has shape {tuple(tree[entry.key].shape)}, "
        f"expected {entry.shape}; give a checkpoint of this model and number of classes, {partial}"
    )


def _told(source: str, tree: Tree, listing: Sequence[Entry]) -> str:
    """What of a file was loaded, and what was not."""
    fitting = _fitting(listing, tree)
    known = {entry.key for entry in listing}
    groups = {
        "other shape": [
            f"{entry.key} {_shape(tree[entry.key].shape)} for {_shape(entry.shape)}"
            for entry in listing
            if entry.key in tree and not _fits(entry, tree)
        ],
        "not in the file": [entry.key for entry in listing if entry.key not in tree],
        "not in the model": [key for key in tree if key not in known],
    }
    details = [f"{what}: {_some(names)}" for what, names in groups.items() if names]
    return "; ".join([f"started from '{source}': {len(fitting)} of {len(listing)} entries fit", *details])


def _shape(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
