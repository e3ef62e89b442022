"""Things that are made by name with options: `adam(beta2=0.99)`, `classification(smoothing=0.1)`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, get_type_hints

from fednorm.core.expression import NAME, Term, parse_term
from fednorm.core.registry import checked_options
from fednorm.errors import ConfigError, unknown

T = TypeVar("T")


class Factories(Generic[T]):
    """Functions by name. Their keyword arguments are the options of an expression.

    A parameter of the type `given` is no option: it is handed what is known where the thing is made. `returns` says
    what they must return, and `called` how users know that. `beside` is what they may write in place of a name.
    """

    def __init__(
        self, what: str, example: str, *, given: type[Any], returns: type[Any], called: str, beside: str = ""
    ) -> None:
        self.what, self.example = what, example
        self._given, self._returns, self._called = given, returns, called
        self._beside = [beside] if beside else []
        self._known: dict[str, Callable[..., T]] = {}

    @property
    def names(self) -> list[str]:
        """All names that are known, in the order they came."""
        return list(self._known)

    def register(self, name: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
        """Make a function available under a name; a file that is read again replaces what it brought before."""
        if not re.fullmatch(NAME, name):
            raise ConfigError(f"{self.what} name '{name}' is not usable; expected letters, digits, '-' and '_'")

        def add(make: Callable[..., T]) -> Callable[..., T]:
            if name in self._known and _source(self._known[name]) != _source(make):
                raise ConfigError(f"{self.what} '{name}' is registered already; choose another name")
            self._known[name] = make
            return make

        return add

    def make(self, text: str, given: object) -> tuple[Term, T]:
        """The expression, read, and what it names."""
        term = parse_term(text, self.what, self.example)
        if term.name not in self._known:
            raise unknown(self.what, term.name, [*self._known, *self._beside])
        make = self._known[term.name]
        handed = {
            name: given for name, hint in get_type_hints(make).items() if hint is self._given and name != "return"
        }
        options = checked_options(term, make, handed.keys())
        self._refuse_lack(term, make, {**handed, **options})
        thing = make(**handed, **options)
        if not isinstance(thing, self._returns):
            raise ConfigError(
                f"{self.what} '{term.name}' must return a {self._called}; it returned {type(thing).__name__}"
            )
        return term, thing

    def _refuse_lack(self, term: Term, make: Callable[..., T], values: Mapping[str, Any]) -> None:
        for name, parameter in inspect.signature(make).parameters.items():
            if parameter.default is inspect.Parameter.empty and name not in values:
                raise ConfigError(f"{self.what} '{term}' needs a value; write {term.name}({name}=...)")


def _source(make: Callable[..., Any]) -> tuple[str, str]:
    """Where a function was written."""
    code = getattr(make, "__code__", None)
    return getattr(code, "co_filename", ""), getattr(make, "__qualname__", repr(make))
