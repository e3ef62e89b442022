"""The data of a client that never trained, as the rule sees it that gives the client its statistics."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from fednorm.core.method import Phase
from fednorm.core.state import Tree
from fednorm.engines.base import step_spec
from fednorm.running.plan import Plan


def newcomer_model(plan: Plan, phase: Phase, state: Tree, client: int) -> Tree:
    """The state with the statistics that the method gives a newcomer, from what the client has of unlabelled data."""
    return plan.method.newcomer.from_data(step_spec(plan, phase, probing=False), state, _batches(plan, client))


def _batches(plan: Plan, client: int) -> Iterator[tuple[Tensor, Tensor]]:
    rows = plan.federation.clients[client]
    for part in rows.split(max(2, plan.config.train.batch_size)):
        if len(part) < 2 and len(rows) > 1:
            continue  # as in training, a trailing batch of one example is skipped
        place = part.to(plan.device)
        yield plan.batches.inputs(plan.federation.x[place]), plan.federation.y[place]
