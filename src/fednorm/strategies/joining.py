"""A strategy meets a method: what the strategy needs is added, and what cannot be asynchronous is refused by name."""

from __future__ import annotations

from fednorm.core.method import Method
from fednorm.core.registry import extended
from fednorm.core.strategy import Strategy
from fednorm.errors import ConfigError
from fednorm.methods import parse

_NEEDS = {
    "union": "the data of all clients in one place",
    "lockstep": "all clients of a round in lock-step",
}


def joined(strategy: Strategy, method: str | Method) -> Method:
    """The method with the parts that the strategy needs; its name says all that clients have to know."""
    chosen = parse(method)
    refuse_rounds(chosen)
    parts = strategy.adds(chosen) if strategy.adds else ""
    return extended(chosen, parts) if parts else chosen


def refuse_rounds(method: Method) -> None:
    """Refuse methods whose clients must do something together."""
    for need in sorted(method.needs & _NEEDS.keys()):
        raise ConfigError(
            f"'{method.name}' needs {_NEEDS[need]}, and here clients come one by one; "
            "play it in rounds, or take another method here"
        )
    most = max(len(stage) for stage in method.stages)
    if most > 1:
        raise ConfigError(
            f"'{method.name}' takes {most} exchanges with the same clients to a round, and here every client has one "
            "job at a time; play it in rounds, or take another method here"
        )
