"""What the server of a simulated run knows of its clients' data, for strategies that compute something themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from fednorm.core.strategy import Context
from fednorm.engines.machine import narrow_type
from fednorm.engines.stack.functions import stack_programs
from fednorm.halves.landing import context_of
from fednorm.running.plan import Plan


def known_context(plan: Plan) -> Context:
    """All that a strategy may ask for; whether it may use it in earnest is its own to say."""
    data, engine = plan.federation, plan.config.engine
    stacked = engine.name in ("auto", "stacked")
    return context_of(
        plan,
        data.training_clients,
        task=plan.task,
        num_classes=data.num_classes,
        input_shape=tuple(data.x.shape[1:]),
        mean=data.mean,
        std=data.std,
        proportions=_proportions(plan) if _has_classes(plan) else None,
        examples=_held_out(plan),
        narrow=narrow_type(engine.precision),
        programs=stack_programs(plan.prepared.model, plan.device, engine.precision) if stacked else None,
    )


def _has_classes(plan: Plan) -> bool:
    y = plan.federation.y
    return plan.federation.labels_known and y.dim() == 1 and not y.is_floating_point()


def _proportions(plan: Plan) -> Callable[[int], Sequence[float]]:
    """Shares of the classes in a client's training data."""
    data = plan.federation

    @lru_cache(maxsize=4096)
    def shares(client: int) -> tuple[float, ...]:
        labels = data.y[plan.batches.rows(client).to(data.y.device)].long()
        counts = torch.bincount(labels, minlength=data.num_classes).double()
        return tuple((counts / counts.sum()).tolist())

    return shares


def _held_out(plan: Plan) -> tuple[Tensor, Tensor] | None:
    """Real examples that nobody trains on: what clients set aside for validation, as the model takes them."""
    if not plan.config.data.val_fraction or plan.federation.live is not None:
        return None
    rows = torch.cat([plan.batches.split(client)[1] for client in plan.federation.training_clients])
    rows = rows.unique().to(plan.federation.y.device)
    return plan.batches.inputs(plan.federation.x[rows]), plan.federation.y[rows]
