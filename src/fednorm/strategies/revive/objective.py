"""What images are made for, and its slopes: teacher by teacher, or of all teachers at once where that is a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fednorm.core.state import Tree, named, unnamed
from fednorm.core.strategy import Programs
from fednorm.strategies.revive.features import gap, make_layers_known, seen_by
from fednorm.strategies.revive.generator import Generator, images_of
from fednorm.strategies.revive.guard import LossGuard
from fednorm.strategies.revive.inputs import Inputs
from fednorm.strategies.revive.losses import adversarial_loss, feature_loss, one_hot_loss
from fednorm.strategies.revive.network import Mode, Network
from fednorm.strategies.revive.settings import Settings
from fednorm.strategies.revive.teachers import Teacher, common_mode, stack_of

NOISE, CLASSES = "|noise", "|classes"
"""What is trained beside the generator's own parameters, whose keys have no bar."""
Judge = Callable[[str, Tensor], Tensor]
"""A loss by name -> what of it counts."""


@dataclass(frozen=True)
class Cast:
    """Who takes part: the classifier, its teachers, and the student with how it is run."""

    network: Network
    teachers: Sequence[Teacher]
    student: Tree
    student_mode: Mode = "still"
    programs: Programs | None = None
    """where all teachers may be asked at once"""


class Wanted(NamedTuple):
    """Of each image its class, what each teacher's word on it counts (teacher, image), and the class as a vector."""

    labels: Tensor
    weights: Tensor
    chosen: Tensor


class Slopes(NamedTuple):
    """The images, their losses before weights and guard, what they come to, and its slopes by what is trained."""

    images: Tensor
    losses: dict[str, float]
    cost: float
    grads: Tree


@dataclass(frozen=True)
class Objective:
    """One batch of images and what is asked of it."""

    settings: Settings
    cast: Cast
    generator: Generator
    inputs: Inputs
    wanted: Wanted
    adversarial: bool

    def slopes(self, own: Tree, key: Tensor, guard: LossGuard) -> Slopes:
        """By the generator's parameters, the noise and the classes; `key` draws how images are augmented."""
        found = self._of_all_at_once(own, key)
        if found is None:
            return self._one_by_one(own, key, guard)
        kept = {name: guard.accepts(name, value) for name, value in found.losses.items()}
        if all(kept.values()):
            return found
        return self._one_by_one(own, key, lambda name, loss: loss if kept[name] else loss.new_zeros(()))

    @cached_property
    def _factors(self) -> dict[str, float]:
        """What each loss counts, of those that there are."""
        settings, watched = self.settings, self.cast.network.watched(self.settings.statistics)
        found = {"one_hot": settings.one_hot}
        found |= {"feature": settings.feature} if watched else {}
        return found | ({"adversarial": settings.adversarial} if self.adversarial and settings.adversarial else {})

    def _images(self, own: Tree, chosen: Tensor) -> Tensor:
        parameters = {name: value for name, value in own.items() if name not in (NOISE, CLASSES)}
        with self.cast.network.rounding(chosen.device):
            noise = own[NOISE] + self.settings.conditioning * (chosen @ own[CLASSES])
            images = images_of(self.generator, parameters, noise)
        return images.to(own[NOISE].dtype)

    def _losses(
        self, logits: Tensor, gaps: Tensor | None, student: Tensor | None, labels: Tensor, weights: Tensor
    ) -> dict[str, Tensor]:
        losses = {"one_hot": one_hot_loss(logits, labels, weights)}
        if gaps is not None:
            losses["feature"] = feature_loss(gaps, weights)
        if student is not None:
            losses["adversarial"] = adversarial_loss(logits, student, weights)
        return losses

    # -- as it is --

    def _one_by_one(self, own: Tree, key: Tensor, judge: Judge) -> Slopes:
        who, wanted = self.cast, self.wanted
        network, watched = who.network, who.network.watched(self.settings.statistics)
        leaves = {name: value.detach().requires_grad_() for name, value in own.items()}
        images = self._images(leaves, wanted.chosen)
        x = self.inputs(images, key)
        logits: list[Tensor] = []
        gaps: list[Tensor] = []
        for teacher in who.teachers:
            with seen_by(network, watched) as seen:
                logits.append(network(teacher.tree, x, teacher.mode))
            gaps.append(gap(network, watched, teacher.tree, seen))
        student = network(who.student, x, who.student_mode) if "adversarial" in self._factors else None
        features = torch.stack(gaps) if watched else None
        losses = self._losses(torch.stack(logits), features, student, wanted.labels, wanted.weights)
        total = torch.stack([self._factors[name] * judge(name, loss) for name, loss in losses.items()]).sum()
        told = {name: float(loss.detach()) for name, loss in losses.items()}
        return Slopes(images.detach(), told, float(total.detach()), gradients(total, leaves))

    # -- as a program --

    def _of_all_at_once(self, own: Tree, key: Tensor) -> Slopes | None:
        who, programs, mode = self.cast, self.cast.programs, common_mode(self.cast.teachers)
        if programs is None or mode is None:
            return None
        like = own[NOISE]
        make_layers_known(who.network.watched(self.settings.statistics), who.student, like.device)
        size = self.settings.batch, self.generator.height, self.generator.width
        given = self._given | named("own", own) | {"drawn": self.inputs.drawn(key, size).to(like.device)}
        made = programs.play(
            f"synthesis, {', '.join(self._factors)}, {mode} {who.student_mode}", self._played(programs, mode), given
        )
        if made is None:
            return None
        losses: dict[str, float] = dict(zip(self._factors, made["losses"].tolist(), strict=True))
        cost = sum(self._factors[name] * value for name, value in losses.items())
        return Slopes(made["images"].clone(), losses, cost, unnamed("slope", made))

    @cached_property
    def _given(self) -> Tree:
        """What does not change from step to step."""
        like, wanted = self.wanted.weights, self.wanted
        given = {"labels": wanted.labels, "weights": wanted.weights, "chosen": wanted.chosen}
        given |= {"scale": self.inputs.scale(like), "factors": like.new_tensor(list(self._factors.values()))}
        given |= named("teacher", stack_of(self.cast.teachers))
        return given | (named("student", self.cast.student) if "adversarial" in self._factors else {})

    def _played(self, programs: Programs, mode: Mode) -> Callable[[Tree], Tree]:
        """Teachers are mapped, each with its own gradient: so their layers are those of a stack."""
        who, settings = self.cast, self.settings
        network = who.network.in_stack(programs.model)
        watched, asked = network.watched(settings.statistics), "adversarial" in self._factors

        def played(state: Tree) -> Tree:
            def made(own: Tree) -> tuple[Tensor, Tensor]:
                images = self._images(own, state["chosen"])
                return self.inputs.moved(images, state["drawn"], state["scale"]), images

            def answer(tree: Tree, x: Tensor) -> Tensor:
                return network(tree, x, who.student_mode)

            def of_teacher(x: Tensor, student: Tensor, tree: Tree, weights: Tensor) -> tuple[Tensor, Tensor]:
                with seen_by(network, watched) as seen:
                    logits = network(tree, x, mode)[None]
                gaps = gap(network, watched, tree, seen)[None] if watched else None
                found = self._losses(logits, gaps, student if asked else None, state["labels"], weights[None])
                losses = torch.stack(list(found.values()))
                return (state["factors"] * losses).sum(), losses

            x, pulled, images = cast(Any, torch.func.vjp(made, unnamed("own", state), has_aux=True))
            alone = {key: value[None] for key, value in unnamed("student", state).items()}
            student = torch.vmap(answer, (0, None))(alone, x)[0] if asked else x.new_zeros(())
            slopes = torch.vmap(torch.func.grad(of_teacher, (0, 1), has_aux=True), (0, None, 0, 0))
            each = x.expand(len(state["weights"]), *x.shape)
            (by_x, by_student), losses = slopes(each, student, unnamed("teacher", state), state["weights"])
            by_x = by_x.sum(0)
            if asked:

                def back(tree: Tree, x: Tensor, by_student: Tensor) -> Tensor:
                    return torch.func.vjp(lambda x: answer(tree, x), x)[1](by_student)[0]

                by_x = by_x + torch.vmap(back, (0, None, None))(alone, x, by_student.sum(0))[0]
            (by_own,) = pulled(by_x)
            return {"images": images, "losses": losses.sum(0), **named("slope", by_own)}

        return played


def gradients(total: Tensor, leaves: Tree) -> Tree:
    """Of a loss by some tensors; zero where it does not depend on them, or where the guard left nothing of it."""
    if not total.requires_grad:
        return {name: torch.zeros_like(value) for name, value in leaves.items()}
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))
