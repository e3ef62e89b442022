"""How names from outside come in: registering twice is told from registering again, installed packages are found."""

from __future__ import annotations

import importlib.metadata
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fednorm.core.expression import NAME
from fednorm.errors import ConfigError, first_line

GROUP = "fednorm"
"""The group of entry points in which installed packages name the modules that register what they bring."""

Made = TypeVar("Made")


@dataclass(frozen=True)
class Published(Generic[Made]):
    """What a registry knows about the name of something out of a paper."""

    name: str
    paper: str
    summary: str
    make: Callable[..., Made]
    reconstruction: bool = False
    """True where the source is not complete enough to claim a reproduction."""

    @property
    def options(self) -> Mapping[str, Any]:
        return {name: p.default for name, p in inspect.signature(self.make).parameters.items()}


def check_name(what: str, name: str, make: Callable[..., Any], known: Callable[..., Any] | None) -> None:
    """Refuse a name that cannot be written in an expression, or that something else has.

    `known` is what has the name already. The same function of the same file may come again, since a file is imported
    again by a notebook, by a worker process, or under another name.
    """
    if not re.fullmatch(NAME, name) or ":" in name:
        raise ConfigError(f"{what} name '{name}' is not usable; expected letters, digits, '-' and '_'")
    if known is not None and _origin(known) != _origin(make):
        raise ConfigError(f"{what} '{name}' is registered already; choose another name")


def _origin(make: Callable[..., Any]) -> tuple[str, str]:
    """Where a function or class was written, and what it is called there."""
    plain = inspect.unwrap(make)
    try:
        file = inspect.getsourcefile(plain)
    except TypeError:  # a partial, or something else that is called but was not written as such
        file = None
    return file or type(plain).__module__, getattr(plain, "__qualname__", repr(plain))


def summary_of(make: Callable[..., Any], given: str = "") -> str:
    """One line on something that was registered: the one given, or the first of its own docstring."""
    return given or (inspect.getdoc(make) or "").partition("\n")[0].rstrip(".")


_looked: list[bool] = []


def load_installed() -> None:
    """Import what installed packages name in the group `fednorm`, once; one that fails is named and left out."""
    if _looked:
        return
    _looked.append(True)
    for point in importlib.metadata.entry_points(group=GROUP):
        try:
            point.load()
        except Exception as error:  # whatever another package's import raises
            said = f"{type(error).__name__}: {first_line(error)}"
            print(f"warning: entry point '{point.name}' ({point.value}) failed ({said}); left out", file=sys.stderr)
