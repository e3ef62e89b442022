"""The one small grammar for names with options: `fixbn(at=0.5)+gn`, `dir_client(alpha=0.1)`, `resnet20(shortcut=B)`."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Any

from fednorm.errors import ConfigError

NAME = r"[A-Za-z][A-Za-z0-9_.:/-]*"
MOST = (1 << 63) - 1
"""The largest whole number: what a tensor, a seed and a file of state can hold."""
_TERM = re.compile(rf"\s*({NAME})\s*(?:\(([^()]*)\))?\s*")


@dataclass(frozen=True)
class Term:
    """A name with its options."""

    name: str
    options: dict[str, Any]

    def __str__(self) -> str:
        shown = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name}({shown})" if shown else self.name


def parse_terms(text: str, what: str, example: str) -> list[Term]:
    """Names joined by `+`, each with optional NAME=VALUE options; words need no quotes.

    >>> [str(term) for term in parse_terms("a(x=1, y=word) + b", "method", "")]
    ['a(x=1,y=word)', 'b']
    """
    found: list[Term] = []
    position = 0
    while True:
        match = _TERM.match(text, position)
        if not match:
            raise ConfigError(f"{what} '{text}' cannot be read; expected something like {example}")
        found.append(Term(match[1], _options(match[0].strip(), match[2] or "", example)))
        position = match.end()
        if position == len(text):
            return found
        if text[position] != "+":
            raise ConfigError(
                f"{what} '{text}' cannot be read at '{text[position:]}'; expected something like {example}"
            )
        position += 1


def parse_term(text: str, what: str, example: str) -> Term:
    """One name with its options."""
    terms = parse_terms(text, what, example)
    if len(terms) > 1:
        raise ConfigError(f"{what} '{text}' names more than one; expected something like {example}")
    return terms[0]


def _options(term: str, text: str, example: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, raw = (piece.strip() for piece in item.partition("="))
        if not equals:
            raise ConfigError(f"'{term}' has '{item}' where NAME=VALUE was expected, as in {example}")
        if key in options:
            raise ConfigError(f"'{term}' gives '{key}' twice; keep one")
        options[key] = literal(raw)
        if isinstance(options[key], int) and abs(options[key]) > MOST:
            raise ConfigError(f"'{term}' gives '{key}' a number of {len(raw)} digits; give a smaller one")
    return options


def literal(raw: str) -> Any:
    """A number, true, false, none, a quoted string, or else the word itself.

    >>> literal("0.5"), literal("true"), literal("none"), literal("word")
    (0.5, True, None, 'word')
    """
    words = {"true": True, "false": False, "none": None, "null": None}
    if raw.lower() in words:
        return words[raw.lower()]
    try:
        return ast.literal_eval(raw)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # all that literal_eval can raise
        return raw
