"""The built-in methods, one file each; importing this package registers them all."""

from fednorm.methods import (  # noqa: F401
    centralized,
    fedavg,
    fedbn,
    fedprox,
    fixbn,
    norms,
    silobn,
    standalone,
)
