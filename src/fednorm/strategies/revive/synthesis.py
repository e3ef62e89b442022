"""Images out of teachers: a fast copy of the generator takes a few steps, then the generator moves towards it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from fednorm.core import rng
from fednorm.core.optim import Joined, Optimizer, buffer_key
from fednorm.core.optimizers import ADAM, AdamUpdate
from fednorm.core.state import Tree
from fednorm.strategies.revive.generator import Generator
from fednorm.strategies.revive.guard import LossGuard
from fednorm.strategies.revive.inputs import Inputs
from fednorm.strategies.revive.losses import teacher_weights
from fednorm.strategies.revive.objective import CLASSES, NOISE, Cast, Objective, Wanted
from fednorm.strategies.revive.pool import draw_labels
from fednorm.strategies.revive.settings import Settings

GENERATOR_ADAM = Optimizer(AdamUpdate(beta1=0.5), ADAM.buffers, "adam")


@dataclass
class Synthesis:
    """What came of it."""

    images: Tensor
    """of the step with the lowest loss, in [0, 1], not augmented"""
    labels: Tensor
    fast: Tree
    """the parameters of the fast copy after its steps"""
    losses: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    """by name, step by step, before their weights and before the guard"""


def synthesise(
    settings: Settings,
    cast: Cast,
    generator: Generator,
    parameters: Tree,
    inputs: Inputs,
    guard: LossGuard,
    key: Tensor,
    adversarial: bool,
) -> Synthesis:
    """A batch of images that the teachers know, and that the student, with `adversarial`, is least sure of."""
    proportions = torch.stack([teacher.proportions for teacher in cast.teachers])
    device, dtype = proportions.device, next(iter(parameters.values())).dtype
    labels = draw_labels(rng.key(key, "labels"), proportions.mean(0), settings.batch)
    fast = dict(parameters)
    for name, count in ((NOISE, settings.batch), (CLASSES, proportions.shape[1])):
        fast[name] = rng.normal(rng.key(key, name[1:]).to(device), (count, settings.latent)).to(dtype)
    factors: dict[str, float] = dict.fromkeys((NOISE, CLASSES), settings.latent_lr / settings.generator_lr)
    buffers = fresh_buffers(fast)
    weights = teacher_weights(proportions, labels).to(dtype)
    chosen = functional.one_hot(labels, proportions.shape[1]).to(dtype)  # a product, since its gradient has one order
    objective = Objective(settings, cast, generator, inputs, Wanted(labels, weights, chosen), adversarial)
    made, best = Synthesis(labels.new_empty(0), labels, {}), math.inf
    for step in range(settings.steps):
        found = objective.slopes(fast, rng.key(key, "augment", step), guard)
        made.losses.append(found.losses)
        if found.cost < best or step == 0:
            best, made.images = found.cost, found.images
        numbers = {"lr": settings.generator_lr, "weight_decay": 0.0}
        fast, buffers = Joined(GENERATOR_ADAM).step(fast, found.grads, buffers, numbers, factors)
    made.fast = {name: fast[name] for name in parameters}
    return made


def fresh_buffers(parameters: Tree) -> Tree:
    """Adam's buffers before its first step."""
    return {
        buffer_key(part, name): torch.zeros_like(value) for name, value in parameters.items() for part in ADAM.buffers
    }


def reptile(parameters: Tree, fast: Tree, buffers: Tree, lr: float) -> tuple[Tree, Tree]:
    """The generator's next parameters and buffers: one step of Adam along G - G'."""
    grads = {name: value - fast[name] for name, value in parameters.items()}
    return Joined(GENERATOR_ADAM).step(parameters, grads, buffers, {"lr": lr, "weight_decay": 0.0}, {})
