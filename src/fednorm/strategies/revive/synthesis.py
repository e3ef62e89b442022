"""Images out of teachers: a fast copy of the generator takes a few steps, then the generator moves towards it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from fednorm.core import rng
from fednorm.core.optim import Joined, Optimizer, buffer_key
from fednorm.core.optimizers import ADAM, AdamUpdate
from fednorm.core.state import Tree
from fednorm.data.augment import augment
from fednorm.strategies.revive.features import gap, seen_by
from fednorm.strategies.revive.generator import images_of
from fednorm.strategies.revive.guard import LossGuard
from fednorm.strategies.revive.losses import adversarial_loss, feature_loss, one_hot_loss, teacher_weights
from fednorm.strategies.revive.network import Mode, Network
from fednorm.strategies.revive.pool import draw_labels
from fednorm.strategies.revive.settings import Settings
from fednorm.strategies.revive.teachers import Teacher

GENERATOR_ADAM = Optimizer(AdamUpdate(beta1=0.5), ADAM.buffers, "adam")
_NOISE, _CLASSES = "|noise", "|classes"
"""What is trained beside the generator's own parameters, whose keys have no bar."""


@dataclass(frozen=True)
class Inputs:
    """How images in [0, 1] become inputs of the classifier."""

    augmentation: str
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __call__(self, images: Tensor, key: Tensor) -> Tensor:
        """Inputs that are augmented by what the key draws, or each of several keys for a row of images."""

        def moved_by(images: Tensor, key: Tensor) -> Tensor:
            return augment(images, key, self.augmentation)

        moved = torch.vmap(moved_by)(images, key) if key.dim() else moved_by(images, key)
        if not self.mean:
            return moved
        mean, std = self._scale(moved)
        return (moved - mean) / std

    def images_of(self, inputs: Tensor) -> Tensor:
        """The images in [0, 1] that some inputs were made of: what moves into an image from outside is black there."""
        if not self.mean:
            return inputs
        mean, std = self._scale(inputs)
        return inputs * std + mean

    def _scale(self, like: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = (like.new_tensor(values).view(1, -1, 1, 1) for values in (self.mean, self.std))
        return mean, std


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


@dataclass(frozen=True)
class Cast:
    """Who takes part: the classifier, its teachers, and the student with how it is run."""

    network: Network
    teachers: Sequence[Teacher]
    student: Tree
    student_mode: Mode = "still"


def synthesise(
    settings: Settings,
    cast: Cast,
    generator: nn.Module,
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
    weights = teacher_weights(proportions, labels).to(dtype)
    fast = dict(parameters)
    for name, count in ((_NOISE, settings.batch), (_CLASSES, proportions.shape[1])):
        fast[name] = rng.normal(rng.key(key, name[1:]).to(device), (count, settings.latent)).to(dtype)
    factors: dict[str, float] = dict.fromkeys((_NOISE, _CLASSES), settings.latent_lr / settings.generator_lr)
    buffers = fresh_buffers(fast)
    chosen = functional.one_hot(labels, proportions.shape[1]).to(dtype)  # a product, since its gradient has one order
    made, best = Synthesis(labels.new_empty(0), labels, {}), math.inf
    for step in range(settings.steps):
        leaves = {name: value.detach().requires_grad_() for name, value in fast.items()}
        own = {name: value for name, value in leaves.items() if name in parameters}
        with cast.network.rounding(device):
            images = images_of(generator, own, leaves[_NOISE] + settings.conditioning * (chosen @ leaves[_CLASSES]))
        images = images.to(dtype)
        losses = _losses(settings, cast, inputs(images, rng.key(key, "augment", step)), labels, weights, adversarial)
        factor = {"feature": settings.feature, "one_hot": settings.one_hot, "adversarial": settings.adversarial}
        total = torch.stack([factor[name] * guard(name, loss) for name, loss in losses.items()]).sum()
        made.losses.append({name: float(loss.detach()) for name, loss in losses.items()})
        cost = float(total.detach())
        if cost < best or step == 0:
            best, made.images = cost, images.detach()
        grads = gradients(total, leaves)
        numbers = {"lr": settings.generator_lr, "weight_decay": 0.0}
        fast, buffers = Joined(GENERATOR_ADAM).step(fast, grads, buffers, numbers, factors)
    made.fast = {name: fast[name] for name in parameters}
    return made


def _losses(
    settings: Settings, cast: Cast, x: Tensor, labels: Tensor, weights: Tensor, adversarial: bool
) -> dict[str, Tensor]:
    network, watched = cast.network, cast.network.watched(settings.statistics)
    logits: list[Tensor] = []
    gaps: list[Tensor] = []
    for teacher in cast.teachers:
        with seen_by(network, watched) as seen:
            logits.append(network(teacher.tree, x, teacher.mode))
        gaps.append(gap(network, watched, teacher.tree, seen))
    losses = {"one_hot": one_hot_loss(torch.stack(logits), labels, weights)}
    if watched:
        losses["feature"] = feature_loss(torch.stack(gaps), weights)
    if adversarial and settings.adversarial:
        losses["adversarial"] = adversarial_loss(
            torch.stack(logits), network(cast.student, x, cast.student_mode), weights
        )
    return losses


def gradients(total: Tensor, leaves: Tree) -> Tree:
    """Of a loss by some tensors; zero where it does not depend on them, or where the guard left nothing of it."""
    if not total.requires_grad:
        return {name: torch.zeros_like(value) for name, value in leaves.items()}
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def fresh_buffers(parameters: Tree) -> Tree:
    """Adam's buffers before its first step."""
    return {
        buffer_key(part, name): torch.zeros_like(value) for name, value in parameters.items() for part in ADAM.buffers
    }


def reptile(parameters: Tree, fast: Tree, buffers: Tree, lr: float) -> tuple[Tree, Tree]:
    """The generator's next parameters and buffers: one step of Adam along G - G'."""
    grads = {name: value - fast[name] for name, value in parameters.items()}
    return Joined(GENERATOR_ADAM).step(parameters, grads, buffers, {"lr": lr, "weight_decay": 0.0}, {})
