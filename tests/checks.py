"""What the tests of methods share: distances, plain centralized training to compare with, and a look at the wire."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

import tiny
from fednorm.core.schedule import lr_factor
from fednorm.core.state import Entry, Kind, Tree, entries
from fednorm.core.step import training_mode
from fednorm.engines.base import Train
from fednorm.halves.prepared import lr_factors
from fednorm.halves.prepared_phase import PreparedPhase
from fednorm.halves.training import Job, Outcome
from fednorm.running.plan import Plan
from fednorm.running.run import Run
from fednorm.running.store import Store

EXACT = 1e-12
WHOLE_BATCHES = {"data": tiny.federation((4, 6, 5)), "train__batch_size": 6, "train__local_steps": 1}
"""One step a round on all of a client's data: weights by size are then weights by batch."""


def distance(left: Tree, right: Tree) -> float:
    """The largest difference between two trees of the same keys."""
    assert left.keys() == right.keys()
    return max(float((left[key].double() - right[key].double()).abs().max()) for key in left)


def centralized_sgd(made: Plan, *, momentum: float = 0.0, hold: frozenset[Kind] = frozenset()) -> Tree:
    """The plan's rounds as steps of torch's own SGD on the joined batches of all clients."""
    model = copy.deepcopy(made.prepared.model)
    train = made.config.train
    factors = lr_factors(made.prepared, made.method.phases[0].rule)
    groups = [{"params": [p], "factor": factors.get(name, 1.0)} for name, p in model.named_parameters()]
    optimizer = torch.optim.SGD(groups, lr=train.lr, momentum=momentum, weight_decay=train.weight_decay)
    for k in range(made.config.rounds):
        for group in optimizer.param_groups:
            group["lr"] = train.lr * group["factor"] * lr_factor(train.schedule, k + 1, made.config.rounds)
        x, y = tiny.union_batch(made, k)
        optimizer.zero_grad()
        with training_mode(model, hold):
            made.task.loss(model(x), y).backward()
        optimizer.step()
    return {entry.key: model.state_dict()[entry.key] for entry in entries(model)}


def warmed_up(model: nn.Module) -> nn.Module:
    """A model whose running statistics are those of some data."""
    model.train()
    with torch.no_grad():
        for seed in range(3):
            model(tiny.examples(16, shift=0.5, seed=seed)[0])
    return model.eval()


def keys_of(listing: Iterable[Entry], *kinds: Kind) -> list[str]:
    """Keys of the entries of some kinds."""
    return [entry.key for entry in listing if entry.kind in kinds]


def only(tree: Tree, keys: Iterable[str]) -> Tree:
    """A part of a tree."""
    return {key: tree[key] for key in keys}


@dataclass
class Exchange:
    """One exchange as it went over the wire."""

    phase: PreparedPhase
    jobs: Sequence[Job]
    outcomes: Sequence[Outcome]


@dataclass
class Spy:
    """Training that keeps what it was asked and what it answered."""

    train: Train
    log: list[Exchange] = field(default_factory=list)

    def __call__(self, phase: PreparedPhase, jobs: Sequence[Job], probing: bool = False) -> Iterator[Outcome]:
        outcomes = list(self.train(phase, jobs, probing))
        self.log.append(Exchange(phase, jobs, outcomes))
        return iter(outcomes)


def spied(made: Plan) -> tuple[Run, Spy]:
    """A run that was not played yet, and the spy in the place of its engine's training."""
    run = Run(made, Store())
    run.engine.train = spy = Spy(run.engine.train)
    return run, spy


def average(outcomes: Sequence[Outcome], weights: Sequence[float], key: str) -> torch.Tensor:
    """sum_k p_k x_k of what clients sent."""
    return sum((weight * o.update.shared[key] for weight, o in zip(weights, outcomes, strict=True)), torch.zeros(()))
