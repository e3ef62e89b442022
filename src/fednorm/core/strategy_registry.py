"""Strategies by name, in the grammar of methods: `fedbuff(b=10)` alone, `fedbuff(b=10)+fedbn` with a method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from fednorm.core.expression import Term, parse_terms
from fednorm.core.extending import Published, check_name, load_installed, summary_of
from fednorm.core.registry import checked_options, known_methods
from fednorm.core.strategy import Strategy
from fednorm.errors import ConfigError, unknown

Factory = Callable[..., Strategy]
StrategyInfo = Published[Strategy]
_EXAMPLE = "fedbuff(b=10)+fedbn"


_REGISTRY: dict[str, StrategyInfo] = {}


def register_strategy(
    name: str, *, paper: str = "", summary: str = "", reconstruction: bool = False
) -> Callable[[Factory], Factory]:
    """Make a function that returns a `Strategy` available under a name; its keyword arguments are the options."""

    def add(make: Factory) -> Factory:
        known = _REGISTRY.get(name)
        check_name("strategy", name, make, known.make if known else None)
        _REGISTRY[name] = StrategyInfo(name, paper, summary_of(make, summary), make, reconstruction)
        return make

    return add


def known_strategies() -> Mapping[str, StrategyInfo]:
    """All strategies registered so far, by name; `fednorm.strategies` has the same function with the built-in ones."""
    load_installed()
    return dict(sorted(_REGISTRY.items()))


def parse_strategy(text: str | Strategy) -> Strategy:
    """The strategy that an expression names; take it from `fednorm.strategies`, where it is `parse`.

    >>> from fednorm.strategies import parse
    >>> parse("fedbuff(b=3)").buffer
    3
    """
    if isinstance(text, Strategy):
        return text
    terms = parse_terms(text, "strategy", "fedbuff(b=10)")
    if len(terms) > 1:
        raise ConfigError(
            f"strategy '{text}' names more than a strategy; give all of it as the method, --method '{text}'"
        )
    return _made(terms[0])


def split(text: str) -> tuple[Strategy, str]:
    """A strategy and the method that it is joined with, `fedavg` where none is.

    >>> from fednorm.strategies import split
    >>> strategy, method = split("fedbuff(b=3) + fixbn(at=0.5) + gn")
    >>> strategy.name, method
    ('fedbuff(b=3)', 'fixbn(at=0.5)+gn')
    """
    terms = parse_terms(text, "strategy", _EXAMPLE)
    known = known_strategies()
    chosen = [term for term in terms if term.name in known]
    if len(chosen) > 1:
        raise ConfigError(f"'{chosen[0]}' and '{chosen[1]}' are both strategies; keep one")
    if not chosen:
        methods = known_methods()
        for term in terms:
            if term.name not in methods:
                raise unknown("strategy", term.name, known)
        raise ConfigError(f"'{text}' names no strategy; put one before it, as in {_EXAMPLE}")
    return _made(chosen[0]), "+".join(str(term) for term in terms if term is not chosen[0]) or "fedavg"


def _made(term: Term) -> Strategy:
    known = known_strategies()
    if term.name not in known:
        raise unknown("strategy", term.name, known)
    make = known[term.name].make
    options = checked_options(term, make)
    try:
        made = make(**options)
    except ConfigError as error:
        raise ConfigError(f"'{term}': {error}") from None
    if not isinstance(made, Strategy):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"strategy '{term.name}' must return a Strategy; it returned {type(made).__name__}")
    return replace(made, name=str(term))
