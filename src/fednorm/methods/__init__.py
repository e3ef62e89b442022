"""The built-in methods, one file each; importing this package registers them all."""

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
)
