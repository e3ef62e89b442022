"""Every failure a user can cause or meet has a type, a one-line text and an exit code."""

from __future__ import annotations

import difflib
import importlib.util
import unicodedata
from collections.abc import Iterable, Sequence


class FednormError(Exception):
    """Base of all errors that fednorm raises on purpose; `exit_code` is what the command line returns."""

    exit_code = 1
    run: object = None
    """which of several runs it ended, where that is known"""


class ConfigError(FednormError):
    """Bad input: a value, a name, a combination that cannot work."""

    exit_code = 2


class UserCodeError(ConfigError):
    """Code that the user brought failed: a model, a loss, a part of a method. `__cause__` is what it raised."""


class ExampleError(ConfigError):
    """An example that was read in the course of a run cannot be used; the text names its client and its item."""


class CheckpointError(FednormError):
    """A file that cannot be trusted or does not belong here."""

    exit_code = 2


class StateError(FednormError):
    """A client does not have the state of its own that the server goes on from."""

    exit_code = 2


class WireError(FednormError):
    """A message that is truncated, altered, or of another run, method, version or schema; nothing was changed by it."""

    exit_code = 2

    def __init__(
        self, text: str, *, client: int | None = None, exchange: int | None = None, entry: str | None = None
    ) -> None:
        self.client, self.exchange, self.entry = client, exchange, entry
        named = {"client": client, "exchange": exchange, "entry": entry}
        where = ", ".join(f"{what} {value!r}" for what, value in named.items() if value is not None)
        super().__init__(f"{where}: {text}" if where else text)


class DivergedError(FednormError):
    """Training produced a value that is not finite."""

    exit_code = 3
    round: int | None = None
    """in which round, or on a clock on the way to which version, where that is known"""


class QuorumError(FednormError):
    """Too few clients delivered a usable update."""

    exit_code = 4


class DiskError(FednormError):
    """The disk is full or refuses to be written."""

    exit_code = 5


class LockedError(FednormError):
    """Another process works in this folder."""

    exit_code = 6


def visible(text: str) -> str:
    r"""A text in which nothing acts on a terminal: what file names and files hold may be anybody's.

    Control characters but tabs and ends of lines, marks that turn the direction of writing, and bytes that are no text
    are shown by their number.

    >>> visible("a\x1b[2Jb"), visible("\u202ec\udcff, é")
    ('a\\x1b[2Jb', '\\u202ec\\udcff, é')
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(each if _is_harmless(each) else ascii(each)[1:-1] for each in text)


def _is_harmless(character: str) -> bool:
    return character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp")


def first_line(error: BaseException) -> str:
    """What another library's error says, without the pages that may follow; its type where it says nothing.

    >>> first_line(ValueError("no such layer\\nsee the manual")), first_line(AssertionError())
    ('no such layer', 'AssertionError')
    """
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def unknown(what: str, name: object, options: Iterable[str], listing: str = "") -> ConfigError:
    """An error for a name that is not in a list, with the nearest name that is.

    >>> str(unknown("method", "fedbm", ["fedavg", "fedbn"], "fednorm methods"))
    "method 'fedbm' is not known; did you mean 'fedbn'? (`fednorm methods` lists all 2)"
    """
    known = sorted(set(options))
    near = nearest(str(name), known)
    hint = f"; did you mean '{near[0]}'?" if near else f"; known: {', '.join(known)}."
    where = f" (`{listing}` lists all {len(known)})" if listing else ""
    return ConfigError(f"{what} '{name}' is not known{hint}{where}")


def nearest(name: str, known: Sequence[str]) -> list[str]:
    """The one name that somebody may have meant, or none."""
    return difflib.get_close_matches(name, known, n=1, cutoff=0.5)


def is_installed(module: str) -> bool:
    """Whether a package is there; a folder that happens to have its name is none."""
    found = importlib.util.find_spec(module)
    return found is not None and found.origin is not None


def require(module: str, extra: str, purpose: str) -> None:
    """Refuse early, with the exact pip line, when an optional package is missing."""
    if not is_installed(module):
        raise ConfigError(f'{purpose} needs {module}: pip install "fednorm[{extra}]"')
