"""Models that change attributes of their own in the forward pass, such as counters: a program would freeze them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fednorm.layers.keyed import Keyed

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_OURS = vars(nn.Module()).keys()


class ChangesItself(Exception):
    """A forward pass is more than a function of tensors: the number of clients that share one would change results."""


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Refuse what changes plain attributes of a model's modules, and give them back what they were."""
    before = _attributes(model)
    yield
    after = _attributes(model)
    changed = [each for each in {**before, **after} if before.get(each, _MISSING) != after.get(each, _MISSING)]
    if not changed:
        return
    modules = dict(model.named_modules())
    for path, name in changed:
        if (path, name) in before:
            setattr(modules[path], name, before[path, name])
        else:
            delattr(modules[path], name)
    path, name = changed[0]
    raise ChangesItself(f"its forward pass changes '{path}.{name}'" if path else f"its forward pass changes '{name}'")


_MISSING = object()


def _attributes(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Copies of the attributes of all modules that are plain values, by the module's path and their name."""
    return {
        (path, name): copy.deepcopy(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        # How often a keyed layer was called begins anew with every forward pass.
        if name not in _OURS and _is_plain(value) and not (isinstance(module, Keyed) and name == "calls")
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
