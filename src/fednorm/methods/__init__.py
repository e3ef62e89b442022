"""The built-in methods, one file each; importing this package registers them all.

So this is where to take `known_methods`, `parse` and `register` from: a name of your own then meets theirs.
"""

from fednorm.core.registry import known_methods, parse, register
from fednorm.methods import (  # noqa: F401
    centralized,
    decoupled,
    fedavg,
    fedbn,
    fedbs,
    fedprox,
    fedtan,
    fedwon,
    fixbn,
    momentum,
    norms,
    server_optimizers,
    shared_statistics,
    silobn,
    standalone,
    statistics,
    tracker,
)

__all__ = ["known_methods", "parse", "register"]
