"""The built-in strategies, one file each; importing this package registers them all.

So this is where to take `known_strategies`, `parse`, `split` and `register_strategy` from.
"""

from fednorm.core.strategy_registry import known_strategies, register_strategy, split
from fednorm.core.strategy_registry import parse_strategy as parse
from fednorm.strategies import afl, ca2fl, fedasync, fedbuff, fedrevive, sync  # noqa: F401
from fednorm.strategies.joining import joined

__all__ = ["joined", "known_strategies", "parse", "register_strategy", "split"]
