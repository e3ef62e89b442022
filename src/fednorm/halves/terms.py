"""How server and clients come to terms: a method and a model become what both halves work with, or are refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from fednorm.core.method import Method, Phase
from fednorm.core.optimizers import make_optimizer
from fednorm.core.report import BySize, Uniform
from fednorm.core.roles import head
from fednorm.core.state import digest, entries
from fednorm.core.strategy import Strategy
from fednorm.data.streams import batches_per_epoch
from fednorm.errors import ConfigError, WireError
from fednorm.halves.agreed import Agreed
from fednorm.halves.messages import LocalWork, Terms
from fednorm.halves.prepared import prepare
from fednorm.halves.wire import check_terms
from fednorm.layers.scheduled import set_total_steps
from fednorm.methods import parse
from fednorm.pieces.phases import with_lr_factors
from fednorm.pieces.rates import HeadRate

_NEEDS = {
    "union": "the data of all clients in one place",
    "lockstep": "all clients of a round in lock-step",
}


def agree(
    model: nn.Module,
    method: str | Method,
    work: LocalWork,
    *,
    weights: str = "size",
    device: torch.device | str = "cpu",
    allow_noop: bool = False,
    name: str = "the model",
) -> Agreed:
    """What both halves have once a method, a model and the local work are settled; the model given stays as it is."""
    chosen = with_head_rate(with_weights(parse(method), weights), work)
    prepared = prepare(model, chosen, allow_noop=allow_noop, name=name, dtype=getattr(torch, work.dtype))
    if work.head_lr is not None and not head(prepared.model):
        raise ConfigError(
            f"train.head_lr={work.head_lr} finds no head in {name}: it has no linear layer, no convolution and no "
            "backbone; leave it out"
        )
    set_total_steps(prepared.model, work.total_steps)
    prepared.model.to(device)
    optimizer = make_optimizer(work.optimizer, work.momentum)
    return Agreed(prepared=prepared, work=work, optimizer=optimizer, device=torch.device(device))


def with_weights(method: Method, weights: str) -> Method:
    """The method with `uniform` where it would weigh by size; weights a method sets itself stay."""
    return method if weights != "uniform" else method.map_phases(with_uniform)


def with_uniform(phase: Phase) -> Phase:
    """A phase in which those weigh the same that would weigh by size."""
    swapped = {kind: Uniform() if weigh == BySize() else weigh for kind, weigh in phase.weigh.items()}
    return replace(phase, weigh=swapped)


def with_head_rate(method: Method, work: LocalWork) -> Method:
    """The method with the head's learning rate as a multiple of that of all else, where the work has one."""
    if work.head_lr is None:
        return method
    if not work.lr:
        raise ConfigError(
            f"train.head_lr={work.head_lr} is kept as a multiple of train.lr, which is 0; give train.lr above 0"
        )
    factors = HeadRate(work.head_lr / work.lr)
    return method.map_phases(lambda phase: with_lr_factors(phase, factors))


def typical_steps(work: LocalWork, sizes: Mapping[int, int]) -> int:
    """Steps of an average client in a round, for layers whose schedule spans the training.

    `sizes` counts clients by how many examples they train on: there may be a million clients, but not a million sizes.

    >>> typical_steps(LocalWork(unit="epochs", amount=2, batch_size=10), {20: 3, 40: 1})
    5
    """
    if work.unit == "steps":
        return work.amount
    steps = sum(count * batches_per_epoch(size, work.batch_size) for size, count in sizes.items() if size)
    return max(1, round(work.amount * steps / sum(sizes.values())))


def total_steps(work: LocalWork, sizes: Mapping[int, int], strategy: Strategy | None = None) -> int:
    """Steps of an average client in the whole run, for layers whose schedule spans the training.

    Where clients come one by one, a version is the work of a few of them: of as many as a strategy's buffer holds.

    >>> total_steps(LocalWork(rounds=8, unit="steps", amount=10), {20: 16}, Strategy(buffer=4))
    20
    """
    share = 1.0 if strategy is None or strategy.barrier else strategy.buffer / sum(sizes.values())
    return max(1, round(work.rounds * typical_steps(work, sizes) * share))


def terms_of(agreed: Agreed, *, run: str, weights: str = "size", model: str = "", task: str = "") -> Terms:
    """The terms of a federation whose clients are not in one place; methods that need more are refused by name."""
    refuse_needs(agreed.method)
    return Terms(
        run=run,
        method=agreed.method.name,
        weights=weights,
        model=model or type(agreed.prepared.model).__name__,
        schema=agreed.schema_digest,
        initial=digest(agreed.prepared.initial),
        work=agreed.work,
        task=task,
    )


def refuse_needs(method: Method) -> None:
    """Refuse what only a simulator can offer."""
    for need in sorted(method.needs & _NEEDS.keys()):
        raise ConfigError(
            f"'{method.name}' needs {_NEEDS[need]}, which only the simulator has; "
            "use fednorm.run, or another method here"
        )


def model_digest(model: nn.Module) -> str:
    """A hash of a model's entries with their shapes, before any surgery and in any type of number."""
    listing = [[entry.key, entry.kind, list(entry.shape)] for entry in entries(model)]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()


def refuse_other_terms(terms: Terms, agreed: Agreed, task: str, *, any_start: bool = False) -> None:
    """Refuse terms that mean something else here: another version of a method, another task, model or initial state."""
    if terms.task and terms.task != task:
        raise WireError(f"the server's task is '{terms.task}', this site's '{task}'; give both the same")
    check_terms(terms, agreed.schema_digest)
    if not any_start and terms.initial != digest(agreed.prepared.initial):
        raise WireError(
            f"the server's {terms.model} starts from other values than this site's; build it with the same seed, "
            "or load the same file on both sides"
        )
