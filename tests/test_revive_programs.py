"""FedRevive's server as programs, here played on the CPU: all teachers at once give what each gives alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fednorm.core import rng
from fednorm.core.method import Facts
from fednorm.core.state import Kind, Tree, entries
from fednorm.engines.stack.functions import StackPrograms
from fednorm.layers.stat_tracker import StatTracker
from fednorm.strategies.revive.distil import Distilled, distil
from fednorm.strategies.revive.generator import bare_generator, first_parameters
from fednorm.strategies.revive.guard import LossGuard
from fednorm.strategies.revive.inputs import Inputs
from fednorm.strategies.revive.network import Mode, Network
from fednorm.strategies.revive.objective import Cast
from fednorm.strategies.revive.settings import Settings
from fednorm.strategies.revive.synthesis import Synthesis, synthesise
from fednorm.strategies.revive.teachers import Teacher

SHAPE = 3, 8, 8


def model(norm: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), norm(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), norm(8), nn.ReLU()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)).double()


def tree_of(net: nn.Module, seed: int) -> Tree:
    """A state of its own, with positive variances."""
    draw = torch.Generator().manual_seed(seed)
    state = {key: value.detach().clone() for key, value in net.state_dict().items()}
    return {
        key: value + 0.2 * torch.rand(value.shape, generator=draw, dtype=value.dtype)
        if value.is_floating_point()
        else value
        for key, value in state.items()
    }


def cast_of(norm: type[nn.Module], modes: tuple[Mode, ...]) -> Cast:
    net = model(norm)
    network = Network(net, Facts({entry.key: entry for entry in entries(net)}, frozenset()))
    shares = torch.eye(3).double() * 0.7 + 0.1
    teachers = [Teacher(k, tree_of(net, k), shares[k], mode) for k, mode in enumerate(modes)]
    return Cast(network, teachers, tree_of(net, 9), modes[0])


def made(cast: Cast, settings: Settings, adversarial: bool, guard: LossGuard) -> Synthesis:
    parameters = {key: value.double() for key, value in first_parameters(4, 4, SHAPE, 0).items()}
    inputs = Inputs("crop(2)+flip", (0.4, 0.5, 0.6), (0.2, 0.3, 0.25))
    return synthesise(
        settings, cast, bare_generator(4, 4, SHAPE), parameters, inputs, guard, rng.key(5), adversarial=adversarial
    )


def settings_of(norm: type[nn.Module], **more: Any) -> Settings:
    return Settings(batch=6, latent=4, width=4, statistics="tracker" if norm is StatTracker else "bn", **more)


def assert_near(one: Synthesis, other: Synthesis) -> None:
    assert one.labels.equal(other.labels)
    assert torch.allclose(one.images, other.images, atol=1e-9)
    for mine, theirs in zip(one.losses, other.losses, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9)
    for key, value in one.fast.items():
        assert torch.allclose(value, other.fast[key], atol=1e-8), key


@pytest.mark.parametrize("adversarial", [False, True])
@pytest.mark.parametrize(
    ("norm", "modes"),
    [(StatTracker, ("still",) * 3), (nn.BatchNorm2d, ("still",) * 3), (nn.BatchNorm2d, ("batch",) * 3)],
)
def test_all_teachers_at_once_make_the_same_images(
    norm: type[nn.Module], modes: tuple[Mode, ...], adversarial: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    cast = cast_of(norm, modes)
    programs = StackPrograms(cast.network.model, "tf32")
    alone = made(cast, settings_of(norm), adversarial, LossGuard())
    together = made(replace(cast, programs=programs), settings_of(norm), adversarial, LossGuard())
    assert programs._programs
    assert not programs._refused, capsys.readouterr().err
    assert_near(alone, together)


def test_what_the_guard_leaves_out_is_left_out_of_both() -> None:
    cast, settings = cast_of(StatTracker, ("still",) * 3), settings_of(StatTracker)
    guards = [LossGuard({"feature": [1e-9] * 12, "one_hot": [1.0] * 12}) for _ in range(2)]
    programs = StackPrograms(cast.network.model, "tf32")
    alone = made(cast, settings, False, guards[0])
    together = made(replace(cast, programs=programs), settings, False, guards[1])
    assert_near(alone, together)
    assert guards[0].accepted["feature"] == guards[1].accepted["feature"] == [1e-9] * 12
    assert guards[0].accepted["one_hot"] == pytest.approx(guards[1].accepted["one_hot"])


def test_teachers_that_are_run_differently_are_asked_one_by_one() -> None:
    cast = cast_of(nn.BatchNorm2d, ("still", "batch", "still"))
    programs = StackPrograms(cast.network.model, "tf32")
    alone = made(cast, settings_of(nn.BatchNorm2d), True, LossGuard())
    together = made(replace(cast, programs=programs), settings_of(nn.BatchNorm2d), True, LossGuard())
    assert not programs._programs
    assert together.images.equal(alone.images)


def test_what_cannot_be_a_program_is_computed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    class Curious(StatTracker):
        def forward(self, input: Tensor) -> Tensor:
            return input if float(input.detach().sum()) > -1e30 else -input

    cast = cast_of(StatTracker, ("still",) * 3)
    for module in cast.network.model.modules():
        if type(module) is StatTracker:
            module.__class__ = Curious
    programs = StackPrograms(cast.network.model, "tf32")
    alone = made(cast, settings_of(StatTracker), True, LossGuard())
    together = made(replace(cast, programs=programs), settings_of(StatTracker), True, LossGuard())
    assert together.images.equal(alone.images)
    assert "the server computes step by step, no program could be made (" in capsys.readouterr().err


@pytest.mark.parametrize("hold", [frozenset(), frozenset({Kind.STATISTIC})])
@pytest.mark.parametrize("norm", [StatTracker, nn.BatchNorm2d])
def test_a_student_is_taught_the_same(norm: type[nn.Module], hold: frozenset[Kind]) -> None:
    cast = cast_of(norm, ("still",) * 3)
    network = replace(cast.network, hold=hold)
    keys = [key for key, entry in network.facts.entries.items() if entry.trainable]
    programs = StackPrograms(network.model, "tf32")

    def draw(key: Tensor, labels: Tensor) -> Tensor:
        return torch.vmap(lambda key: rng.uniform(key, (labels.shape[-1], *SHAPE)))(key).double()

    def taught(programs: StackPrograms | None, guard: LossGuard) -> Distilled:
        settings = settings_of(norm, kd_batch=4, kd_steps=4, kd_lr=0.01)
        return distil(settings, network, cast.teachers, cast.student, keys, draw, guard, rng.key(3), programs)

    for before in ({}, {"distillation": [1e-9] * 12}):
        alone, together = taught(None, LossGuard(dict(before))), taught(programs, LossGuard(dict(before)))
        assert not programs._refused
        assert together.losses == pytest.approx(alone.losses, rel=1e-9)
        for key, value in alone.trained.items():
            assert torch.allclose(together.trained[key], value, atol=1e-8), key
            assert before or not value.equal(cast.student[key])
