"""Which clients took part in a round, a function of config and round, for whoever asks after it is over."""

from __future__ import annotations

from collections.abc import Collection

from fednorm.halves.exchange import drawn_cohort
from fednorm.running.plan import Plan


def cohort_of(plan: Plan, round: int) -> list[int]:
    """The clients that trained in a round: those it drew, without those that were gone."""
    clients = plan.federation.training_clients
    return plan.world.present(round, drawn_cohort(plan.work.seed, round, clients, plan.cohort_size))


def averaged_clients(plan: Plan, round: int) -> Collection[int] | None:
    """Whose local state is averaged after a round, as `eval.average` says; None for all clients'."""
    return None if plan.config.eval.average == "all" or not round else frozenset(cohort_of(plan, round))
