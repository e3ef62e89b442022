"""A trial before anything is written: one small batch through the model, the loss, the gradient and the scores.

It is done on copies, and generators are put back, so that a run does not notice it.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fednorm.core.method import Numbers
from fednorm.core.phases import PhaseId, Purpose
from fednorm.core.state import Tree, model_state
from fednorm.core.step import Batch, Carry, by_autograd, forward, training_mode
from fednorm.core.user_code import UserCode, is_users, user_error
from fednorm.errors import ConfigError, FednormError
from fednorm.running.known import known_context
from fednorm.running.plan import Plan, build_model
from fednorm.scoring.tasks import Classification, Segmentation

ROWS = 2
"""Examples of the trial: as few as a batch norm can train on."""
JOBS = 1000
"""Jobs that a schedule is asked about, of as many clients: quick, and enough to find what is usually wrong with one."""


def try_out(plan: Plan, model: nn.Module | None = None) -> None:
    """Refuse a model, a task or a strategy that fails on the data, or does not fit; `model` is one given in Python."""
    rows, key = plan.batches.rows_and_key(plan.federation.training_clients[0], 0)
    batch = Batch(*plan.batches.take(rows[:ROWS], key), key)
    with _generators_put_back(plan.device), UserCode(plan.prepared.name):
        try:
            _train(plan, batch)
            _score(plan)
            _ask_the_clock(plan)
        except FednormError:
            raise
        except Exception as error:
            if not is_users(error):
                _refuse_bare(plan, model, batch)
            raise


def _ask_the_clock(plan: Plan) -> None:
    """Ask a schedule how long some first jobs take, and a strategy what it remembers before the first update."""
    if plan.clock is None:
        return
    for job, client in enumerate(plan.federation.training_clients[:JOBS]):
        plan.clock.schedule.times(plan.config.seed, client, job)
    if plan.clock.strategy.revise is not None:
        plan.clock.strategy.revise.begin(known_context(plan))


def _train(plan: Plan, batch: Batch) -> None:
    """A forward pass as in training, the loss of what comes out, and a backward pass."""
    each = plan.phase(PhaseId(Purpose.TRAIN, 0, len(plan.method.stages[0]) - 1)).passes[0]
    spec = replace(plan.step_spec(each), model=copy.deepcopy(plan.prepared.model))

    def objective(params: Tree, carry: Carry, batch: Batch, numbers: Numbers) -> tuple[Tensor, Tensor]:
        output = forward(spec, params | carry.state, batch.x, batch.key)
        _check_outputs(plan, output)
        loss = plan.task.loss(output, batch.y)
        _check_loss(plan, loss)
        return loss, loss.detach()

    learned = {name for name, parameter in spec.model.named_parameters() if parameter.requires_grad}
    state = model_state(spec.model, plan.prepared.entries)
    params = {key: value for key, value in state.items() if key in learned}
    rest = {key: value for key, value in state.items() if key not in learned}
    with training_mode(spec.model, each.rule.hold):
        by_autograd(objective)(params, Carry(params, rest, {}, {}, params), batch, {})


def _score(plan: Plan) -> None:
    """A forward pass as in a test, and the scores of what comes out; not where a query brings statistics first."""
    if plan.method.query is not None:
        return
    federation = plan.federation
    model = copy.deepcopy(plan.prepared.model)
    rows = torch.arange(min(ROWS, federation.num_tests))
    state = model_state(model, plan.prepared.entries)
    replace(plan.scorer, model=model).rows(state, federation.tests, rows)


def _check_outputs(plan: Plan, output: Any) -> None:
    """Too few outputs fail only where a label is larger, and on a GPU without a word."""
    if not isinstance(plan.task, Classification | Segmentation):
        return
    classes = plan.task.num_classes
    if isinstance(output, Tensor) and output.dim() > 1 and output.shape[1] < classes:
        raise ConfigError(
            f"{plan.prepared.name} has {output.shape[1]} outputs for {classes} classes; "
            f"give it {classes}, or data with fewer classes"
        )


def _check_loss(plan: Plan, loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(f"the loss of task '{plan.task.name}' must be one number for a batch; it is {got}")
    if not loss.requires_grad:
        raise ConfigError(
            f"the loss of {plan.prepared.name} depends on none of its parameters, so nothing can be learned; "
            "look for `detach`, `no_grad` or `.item()` in its forward pass"
        )


def _refuse_bare(plan: Plan, model: nn.Module | None, batch: Batch) -> None:
    """Where a layer of ours fails inside a model: raise the user's error if it fails without surgery as well."""
    network = build_model(plan.config, plan.federation) if model is None else model
    try:
        _bare_output(network, batch.x)
    except Exception as error:
        raise user_error(error, plan.prepared.name) from error


def _bare_output(network: nn.Module, x: Tensor) -> Any:
    dtype = x.dtype if x.is_floating_point() else None
    with torch.no_grad():
        return copy.deepcopy(network).to(x.device, dtype).train()(x)


@contextmanager
def _generators_put_back(device: torch.device) -> Iterator[None]:
    """Every generator that a model may draw from, as it was."""
    ours, numpys = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(ours)
        np.random.set_state(numpys)
