"""The statistics of a client that never trained: given, taken anew from its data, or moved by each test batch."""

from __future__ import annotations

import torch
from torch import Tensor

from fednorm.core import rng
from fednorm.core.method import Phase
from fednorm.core.state import Tree
from fednorm.core.step import StepSpec, forward, training_mode
from fednorm.engines.base import step_spec
from fednorm.layers.batch_stats import moments
from fednorm.pieces.moments import inputs_of_norms, moments_step, std_eps
from fednorm.running.plan import Plan


def reestimated(plan: Plan, phase: Phase, state: Tree, client: int) -> Tree:
    """The state with batch statistics of the client's own unlabelled data (AdaBN, SiloBN's transfer protocol)."""
    spec = step_spec(plan, phase, probing=False)
    step = moments_step("pooled")(spec)
    rest, buffers = {key: state[key] for key in plan.prepared.facts.entries}, {}
    rows = plan.federation.clients[client]
    nothing = torch.zeros((), dtype=torch.int64, device=plan.device)
    with training_mode(spec.model, frozenset()):
        for part in rows.split(max(2, plan.config.train.batch_size)):
            if len(part) < 2 and len(rows) > 1:
                continue  # as in training, a trailing batch of one example is skipped
            place = part.to(plan.device)
            x, y = plan.batches.inputs(plan.federation.x[place]), plan.federation.y[place]
            _, rest, buffers, _, _ = step({}, rest, buffers, {}, x, y, nothing, {})
    return {**state, **rest}


def tracked(spec: StepSpec, state: Tree, x: Tensor, momentum: float) -> Tree:
    """The state with its statistics moved towards those of one unlabelled batch (as TsmoBN does at test time)."""
    scratch = {key: value.clone() for key, value in state.items()}
    with torch.no_grad(), training_mode(spec.model, frozenset()), inputs_of_norms(spec.model) as seen:
        forward(spec, scratch, x, rng.key(0).to(x.device))
    moved = dict(state)
    for layer, inputs in seen.items():
        prefix = f"{layer}." if layer else ""
        mean, var = moments(inputs)
        std = (var + std_eps(spec.model.get_submodule(layer))).sqrt()
        for part, fresh in (("running_mean", mean), ("running_var", var), ("running_std", std)):
            key = prefix + part
            if key in moved:
                moved[key] = moved[key] + momentum * (fresh - moved[key])
    return moved
