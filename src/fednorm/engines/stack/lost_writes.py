"""Writes in place that would be lost: flattened activations are views in torch's layout, but copies in the stack's."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

_COPYING = {"flatten", "reshape", "reshape_as", "contiguous"}
"""Functions that give a view where the layout allows one, else a copy."""
_VIEWS = {"view", "view_as", "unflatten", "unsqueeze", "squeeze", "select", "narrow", "chunk", "split", "unbind"}
_VIEWS |= {"transpose", "permute", "movedim", "diagonal", "expand", "t", "__getitem__", *_COPYING}


class LostWrite(Exception):
    """What a model wrote into a part of its activations would not be found in them."""


class LostWritesRefused(TorchFunctionMode):
    """Within, a model that reads activations after it wrote into a flattened copy of them is refused.

    Only what is read by the same name counts: that is how such models are written, and most that write into what they
    flattened never look at the original again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sources: dict[int, Tensor] = {}
        """the activations that a copy, or a part of one, was made of, by its identity"""
        self._stale: set[int] = set()
        """activations that lack what was written into a copy of them"""
        self._held: list[Any] = []
        """all of these, since another tensor could be given the identity of one that is gone"""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":  # a shape, say
            return func(*args, **kwargs)
        if self._stale and any(id(each) in self._stale for each in tree_leaves((args, kwargs))):
            raise LostWrite("it writes into activations that it flattened and reads them afterwards")
        result = func(*args, **kwargs)
        first = args[0] if args else None
        if not isinstance(first, Tensor):
            return result
        if _writes(name, kwargs) and id(first) in self._sources:
            self._stale.add(id(self._sources[id(first)]))
        elif name in _VIEWS and id(first) in self._sources:
            self._note(result, self._sources[id(first)])
        elif name in _COPYING and result is not first and not first.is_contiguous():
            self._note(result, first)
        return result

    def _note(self, result: Any, source: Tensor) -> None:
        for each in tree_leaves(result):
            self._sources[id(each)] = source
        self._held += [result, source]


def _writes(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a function changes its first argument.

    >>> [_writes(name, {}) for name in ("mul_", "__setitem__", "__iadd__", "mul", "__add__")]
    [True, True, True, False, False]
    """
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or name.startswith("__i") or bool(kwargs.get("inplace"))
