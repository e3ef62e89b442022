"""Runs in virtual time: one expression holds strategy and method, and what only rounds have is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from fednorm.core.expression import parse_terms
from fednorm.core.method import Method
from fednorm.core.strategy import Strategy
from fednorm.data.federation import Federation
from fednorm.engines.clock.schedule import Clients, Schedule, make_schedule
from fednorm.errors import ConfigError, nearest, unknown
from fednorm.methods import known_methods, parse
from fednorm.running.config import EvalConfig, RunConfig, WorldConfig
from fednorm.strategies import joined, known_strategies, split
from fednorm.strategies import parse as parse_strategy

_EXAMPLE = "fedbuff(b=10)+fedbn"
ROUNDS = "sync"
"""The strategy that plays rounds on the clock."""


class Clock(NamedTuple):
    """What a run on a clock has beside all that runs have."""

    strategy: Strategy
    schedule: Schedule
    concurrency: int


def names_strategy(expression: str) -> bool:
    """Whether one of the parts of an expression is a strategy."""
    known = known_strategies()
    return any(term.name in known for term in parse_terms(expression, "method", _EXAMPLE))


def _without_strategy(expression: str) -> Method:
    """The method of an expression without a strategy; a part that is neither, but nearly one, is refused as such."""
    known, methods = known_strategies(), known_methods()
    for term in parse_terms(expression, "method", _EXAMPLE):
        if term.name not in methods and set(nearest(term.name, [*known, *methods])) & known.keys():
            raise unknown("strategy", term.name, known)
    return parse(expression)


def full_name(expression: str, strategy: str | None = None) -> str:
    """An expression as results have it, with the strategy that was given beside it in front.

    >>> full_name("fedbn+fedbuff(b=3)"), full_name("fedbn", "fedbuff(b = 3)"), full_name("fedprox( mu=1 )")
    ('fedbuff(b=3)+fedbn', 'fedbuff(b=3)+fedbn', 'fedprox(mu=1)')
    """
    text = f"{strategy}+{expression}" if strategy else expression
    if not names_strategy(text):
        return _without_strategy(text).name
    found, method = split(text)
    return f"{found.name}+{parse(method).name}"


def settled(config: RunConfig) -> RunConfig:
    """The config with its strategy in front of its method, as results and folders have it."""
    if config.clock.strategy is None and not names_strategy(config.method):
        return config
    if config.clock.strategy is not None:
        parse_strategy(config.clock.strategy)  # what is no strategy is refused as one
    method = full_name(config.method, config.clock.strategy)
    return replace(config, method=method, clock=replace(config.clock, strategy=None))


def on_one_clock(methods: Sequence[str | Method], config: RunConfig) -> tuple[RunConfig, list[str]]:
    """The config and the names of methods that are compared: all of them on the clock, if one is.

    Those without a strategy have the config's, or rounds. A method that was given as an object keeps its name, so that
    the strategy stays in the config.
    """
    given = config.clock.strategy
    timed = given is not None or any(isinstance(each, str) and names_strategy(each) for each in methods)
    if not timed:
        return config, [each.name if isinstance(each, Method) else full_name(each) for each in methods]
    other = given or ROUNDS
    names = [
        each.name if isinstance(each, Method) else full_name(each, None if names_strategy(each) else other)
        for each in methods
    ]
    kept = other if any(isinstance(each, Method) for each in methods) else None
    return replace(config, clock=replace(config.clock, strategy=kept)), names


def resolved(config: RunConfig, method: Method | None = None) -> tuple[Strategy | None, Method]:
    """The strategy of a config, None for rounds, and its method with what the strategy adds to it."""
    if method is None and names_strategy(config.method):
        strategy, name = split(config.method)
        return strategy, joined(strategy, name)
    chosen = _without_strategy(config.method) if method is None else method
    if config.clock.strategy is None:
        return None, chosen
    strategy = parse_strategy(config.clock.strategy)
    return strategy, joined(strategy, chosen)


def make_clock(config: RunConfig, strategy: Strategy | None, federation: Federation) -> Clock | None:
    """The clock of a run, None for rounds; settings that would have no effect are refused."""
    clock = config.clock
    if strategy is None:
        for name, value, usual in (("concurrency", clock.concurrency, None), ("times", clock.times, "default")):
            if value != usual:
                raise ConfigError(
                    f"clock.{name}={value} is for runs on a clock, and '{config.method}' names no strategy; "
                    "give --async 'fedbuff(b=2)', or leave it out"
                )
        return None
    _refuse_rounds(config)
    available = len(federation.training_clients)
    concurrency = available if clock.concurrency is None else clock.concurrency
    if concurrency > available:
        raise ConfigError(f"clock.concurrency={concurrency} but only {available} clients train; give at most that many")
    if strategy.buffer > available and not strategy.barrier:
        raise ConfigError(
            f"'{strategy.name}' merges {strategy.buffer} updates at a time, and only {available} clients train: "
            f"some would count twice in every version; give b={available} or less"
        )
    known = Clients(len(federation.clients), tuple(federation.client_names or ()))
    return Clock(strategy, make_schedule(clock.times, known), concurrency)


def _refuse_rounds(config: RunConfig) -> None:
    """Refuse what is said of rounds, of which a clock has none."""
    for name in ("clients_per_round", "client_fraction"):
        if getattr(config, name) is not None:
            raise ConfigError(
                f"{name}={getattr(config, name)} is for rounds, and '{config.method}' has none; give clock.concurrency"
            )
    for section, usual in (("world", WorldConfig()), ("eval", EvalConfig())):
        for name in ("dropout", "stragglers", "average", "probes"):
            value = getattr(getattr(config, section), name, None)
            if value != getattr(usual, name, None):
                raise ConfigError(
                    f"{section}.{name}={value} is for rounds, and '{config.method}' has none; leave it out"
                )
