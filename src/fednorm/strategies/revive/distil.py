"""What teachers know, taught to a copy of the server's model on images of the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fednorm.core import rng
from fednorm.core.optim import Joined
from fednorm.core.optimizers import ADAM
from fednorm.core.state import Tree, named, unnamed
from fednorm.core.strategy import Programs
from fednorm.strategies.revive.guard import LossGuard
from fednorm.strategies.revive.losses import distillation_loss
from fednorm.strategies.revive.network import Network
from fednorm.strategies.revive.objective import gradients
from fednorm.strategies.revive.pool import draw_labels
from fednorm.strategies.revive.settings import Settings
from fednorm.strategies.revive.synthesis import fresh_buffers
from fednorm.strategies.revive.teachers import Teacher, common_mode, stack_of

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
    programs: Programs | None = None,
) -> Distilled:
    """Teach a student; only the entries under `keys` are trained, and its statistics are thrown away.

    Teachers stand still, so each sees the images of all steps at once.
    """
    inputs, outputs = _lessons(settings, network, teachers, draw, key, programs)
    trained = {name: student[name] for name in keys}
    buffers = fresh_buffers(trained)
    optimizer = Joined(ADAM)
    numbers = {"lr": settings.kd_lr, "weight_decay": settings.kd_decay}
    losses: list[float] = []
    for step in range(settings.kd_steps):
        part = slice(step * settings.kd_batch, (step + 1) * settings.kd_batch)
        x, answers = inputs[:, part].flatten(0, 1), outputs[:, part].flatten(0, 1)
        lesson = Lesson(x, answers, rng.key(key, "layers", step).to(x.device))
        loss, grads = _slopes(settings, network, student, trained, lesson, guard, programs)
        losses.append(loss)
        trained, buffers = optimizer.step(trained, grads, buffers, numbers, {})
    return Distilled(trained, losses)


class Lesson(NamedTuple):
    """Images, what the teachers say of them, and the key of layers that draw."""

    x: Tensor
    answers: Tensor
    key: Tensor


def _slopes(
    settings: Settings,
    network: Network,
    student: Tree,
    trained: Tree,
    lesson: Lesson,
    guard: LossGuard,
    programs: Programs | None,
) -> tuple[float, Tree]:
    """The loss of a step and its slopes, which are zero where the guard leaves it out."""
    made = None if programs is None else _slopes_as_program(settings, network, student, trained, lesson, programs)
    if made is not None:
        loss = float(made["loss"])
        counts = guard.accepts("distillation", loss)
        slopes = unnamed("slope", made)
        return loss, slopes if counts else {name: torch.zeros_like(slope) for name, slope in slopes.items()}
    leaves = {name: value.detach().requires_grad_() for name, value in trained.items()}
    logits = network({**student, **leaves}, lesson.x, "train", lesson.key)
    told = distillation_loss(lesson.answers, logits, settings.temperature)
    return float(told.detach()), gradients(guard("distillation", told), leaves)


def _slopes_as_program(
    settings: Settings, network: Network, student: Tree, trained: Tree, lesson: Lesson, programs: Programs
) -> Tree | None:
    stacked = network.in_stack(programs.model)

    def loss_of(trained: Tree, rest: Tree, lesson: Lesson) -> Tensor:
        logits = stacked({**rest, **trained}, lesson.x, "train", lesson.key)
        return distillation_loss(lesson.answers, logits, settings.temperature)

    def played(state: Tree) -> Tree:
        alone = {key: value[None] for key, value in state.items()}  # a stack of one
        asked = Lesson(*(alone[name] for name in Lesson._fields))
        slopes, loss = torch.vmap(torch.func.grad_and_value(loss_of))(
            unnamed("trained", alone), unnamed("student", alone), asked
        )
        return {"loss": loss[0], **named("slope", {key: value[0] for key, value in slopes.items()})}

    rest = {key: value for key, value in student.items() if key not in trained}
    given = {**lesson._asdict(), **named("trained", trained), **named("student", rest)}
    return programs.play(f"distillation, {', '.join(sorted(network.hold))}", played, given)


@torch.no_grad()
def _lessons(
    settings: Settings,
    network: Network,
    teachers: Sequence[Teacher],
    draw: Draw,
    key: Tensor,
    programs: Programs | None,
) -> tuple[Tensor, Tensor]:
    """The inputs of all steps that each teacher has something to say on, a row a teacher, and what it says."""
    keys, proportions = rng.key(key, torch.arange(len(teachers))), torch.stack([each.proportions for each in teachers])
    labels = draw_labels(rng.key(keys, "labels"), proportions, settings.kd_batch * settings.kd_steps)
    inputs = draw(rng.key(keys, "images"), labels)
    mode = common_mode(teachers)
    if programs is not None and mode is not None:
        stacked = network.in_stack(programs.model)

        def played(state: Tree) -> Tree:
            with torch.enable_grad():  # without, norms are torch's own, which are slow in a stack
                answer = torch.vmap(lambda tree, x: stacked(tree, x, mode))
                return {"answers": answer(unnamed("teacher", state), state["inputs"])}

        made = programs.play(f"lessons, {mode}", played, {"inputs": inputs, **named("teacher", stack_of(teachers))})
        if made is not None:
            return inputs, made["answers"].clone()
    return inputs, torch.stack([network(each.tree, x, each.mode) for each, x in zip(teachers, inputs, strict=True)])
