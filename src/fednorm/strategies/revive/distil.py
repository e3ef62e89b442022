"""What teachers know, taught to a copy of the server's model on images of the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fednorm.core import rng
from fednorm.core.optim import Joined
from fednorm.core.optimizers import ADAM
from fednorm.core.state import Tree
from fednorm.strategies.revive.guard import LossGuard
from fednorm.strategies.revive.losses import distillation_loss
from fednorm.strategies.revive.network import Network
from fednorm.strategies.revive.pool import draw_labels
from fednorm.strategies.revive.settings import Settings
from fednorm.strategies.revive.synthesis import fresh_buffers, gradients
from fednorm.strategies.revive.teachers import Teacher

Draw = Callable[[Tensor, Tensor], Tensor]
"""(keys, labels) -> inputs of the classifier, augmented, one for each label; for each key there is a row of them."""


class Distilled(NamedTuple):
    """The student's trained entries, and its loss in each step."""

    trained: Tree
    losses: list[float]


def distil(
    settings: Settings,
    network: Network,
    teachers: Sequence[Teacher],
    student: Tree,
    keys: Sequence[str],
    draw: Draw,
    guard: LossGuard,
    key: Tensor,
) -> Distilled:
    """Teach a student; only the entries under `keys` are trained, and its statistics are thrown away.

    Teachers stand still, so each sees the images of all steps at once.
    """
    inputs, outputs = _lessons(settings, network, teachers, draw, key)
    trained = {name: student[name] for name in keys}
    buffers = fresh_buffers(trained)
    optimizer = Joined(ADAM)
    numbers = {"lr": settings.kd_lr, "weight_decay": settings.kd_decay}
    losses: list[float] = []
    for step in range(settings.kd_steps):
        part = slice(step * settings.kd_batch, (step + 1) * settings.kd_batch)
        leaves = {name: value.detach().requires_grad_() for name, value in trained.items()}
        x = inputs[:, part].flatten(0, 1)
        logits = network({**student, **leaves}, x, "train", rng.key(key, "layers", step).to(x.device))
        loss = distillation_loss(outputs[:, part].flatten(0, 1), logits, settings.temperature)
        losses.append(float(loss.detach()))
        grads = gradients(guard("distillation", loss), leaves)
        trained, buffers = optimizer.step(trained, grads, buffers, numbers, {})
    return Distilled(trained, losses)


@torch.no_grad()
def _lessons(
    settings: Settings, network: Network, teachers: Sequence[Teacher], draw: Draw, key: Tensor
) -> tuple[Tensor, Tensor]:
    """The inputs of all steps that each teacher has something to say on, a row a teacher, and what it says."""
    keys, proportions = rng.key(key, torch.arange(len(teachers))), torch.stack([each.proportions for each in teachers])
    labels = draw_labels(rng.key(keys, "labels"), proportions, settings.kd_batch * settings.kd_steps)
    inputs = draw(rng.key(keys, "images"), labels)
    return inputs, torch.stack([network(each.tree, x, each.mode) for each, x in zip(teachers, inputs, strict=True)])
