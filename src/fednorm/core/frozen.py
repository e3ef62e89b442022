"""A dictionary that cannot change, so that what holds it can be compared, hashed and sent to another process."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class FrozenDict(dict[K, V]):
    """A dict for the fields of frozen classes; `{**a, **b}` and `a | b` make plain dicts of it.

    >>> FrozenDict(mu=0.1) == {"mu": 0.1}, hash(FrozenDict(a=1, b=2)) == hash(FrozenDict(b=2, a=1))
    (True, True)
    >>> FrozenDict(mu=0.1)
    FrozenDict({'mu': 0.1})
    """

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(frozenset(self.items()))

    def __repr__(self) -> str:
        return f"FrozenDict({super().__repr__()})"

    def __reduce__(self) -> tuple[Any, ...]:
        # A dict's own way would make an empty one and fill it.
        return FrozenDict, (dict(self),)

    def _refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("a FrozenDict cannot change; make another one: {**old, key: value}")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse
