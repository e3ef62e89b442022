"""The cross-entropy of a stack is one operator, with the numbers of torch's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, grad_and_value
from torch.nn import functional

import tiny
from fednorm import Task
from fednorm.engines.stack.fusion import fuse
from fednorm.engines.stack.kernels.layers import use_kernels
from fednorm.engines.stack.kernels.losses import LossesOfStacks
from fednorm.engines.stack.slot import StackSlot
from fednorm.engines.stack.tracing import trace
from fednorm.running.plan import make_plan
from test_stacked import gap

CLIENTS, BATCH, CLASSES = 3, 5, 4
Loss = Callable[[Tensor, Tensor], Tensor]


def given(*shape: int) -> tuple[Tensor, Tensor]:
    """Scores of a stack, and labels of which some are ignored."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(CLIENTS, BATCH, CLASSES, *shape, generator=draw, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (CLIENTS, BATCH, *shape), generator=draw)
    y[1, :2] = -100
    return x, y


def operators(loss: Loss, *args: Tensor) -> Counter[str]:
    """What a stack's losses and gradients are made of; and they are what they are without the operator."""

    def stacked(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with LossesOfStacks():
            return torch.vmap(grad_and_value(loss))(x, y)

    fused = fuse(trace(stacked, *args))
    for wanted, whole, short in zip(torch.vmap(grad_and_value(loss))(*args), stacked(*args), fused(*args), strict=True):
        assert torch.allclose(wanted, whole, atol=1e-14)
        assert torch.allclose(wanted, short, atol=1e-14)
    return Counter(str(node.target) for node in fused.graph.nodes if node.op == "call_function")


def test_a_loss_and_its_gradient_are_one_operator() -> None:
    found = operators(functional.cross_entropy, *given())
    assert found.keys() == {"fednorm.cross_entropy.default", "<built-in function getitem>"}


def test_a_loss_may_be_a_part_of_another() -> None:
    def penalised(x: Tensor, y: Tensor) -> Tensor:
        return 3 * nn.CrossEntropyLoss(ignore_index=2)(x, y) + x.square().sum()

    x, y = given()
    assert operators(penalised, x, y.clamp(min=0))["fednorm.cross_entropy.default"] == 1


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: functional.cross_entropy(x, y, label_smoothing=0.1),
        lambda x, y: functional.cross_entropy(x, y, torch.arange(4.0, dtype=torch.float64)),
        lambda x, y: functional.cross_entropy(x, y, reduction="sum"),
        lambda x, y: functional.cross_entropy(x, x.detach().sin().softmax(1)),
        lambda x, y: functional.cross_entropy(x.repeat(1, 20_000), y),
    ],
)
def test_other_losses_are_torchs_own(loss: Loss) -> None:
    assert "fednorm.cross_entropy.default" not in operators(loss, *given())


def test_a_loss_may_depend_on_the_gradient_of_one() -> None:
    """As a penalty on it does, which differentiates it once more."""

    def smooth(x: Tensor, y: Tensor) -> Tensor:
        slope = grad(lambda scores: functional.cross_entropy(scores, y))(x)
        return functional.cross_entropy(x, y) + slope.square().sum()

    assert operators(smooth, *given())["fednorm.cross_entropy.default"]


@pytest.mark.parametrize("count", [1, 3])
def test_labels_that_are_too_few_are_refused(count: int) -> None:
    """A kernel would read what lies behind them."""
    with LossesOfStacks(), pytest.raises(ValueError, match=rf"batch_size \(5\) to match target batch_size \({count}\)"):
        torch.vmap(grad_and_value(lambda x, y: functional.cross_entropy(x, y[:count])))(*given())


def test_a_loss_of_pixels_is_torchs_own() -> None:
    assert "fednorm.cross_entropy.default" not in operators(functional.cross_entropy, *given(2, 3))


def test_without_a_stack_the_operator_has_the_gradient_too() -> None:
    x, y = (each[0] for each in given())
    found = []
    for context in (LossesOfStacks(), torch.enable_grad()):
        leaf = x.clone().requires_grad_()
        with context:
            found.append(torch.autograd.grad(2 * functional.cross_entropy(leaf, y), leaf)[0])
    assert torch.allclose(*found, atol=1e-14)


@pytest.mark.parametrize("task", [None, Task(nn.CrossEntropyLoss(), kind="classification", outputs=tiny.NUM_CLASSES)])
def test_rounds_with_it_equal_the_reference(task: Task | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fednorm.engines.stack.slot.DEVICES", {"cpu"})
    data = tiny.federation()
    reference, stacked = (
        make_plan(tiny.config("fedprox", engine__name=engine), model=tiny.residual_net(), federation=data, task=task)
        for engine in ("sequential", "stacked")
    )
    assert use_kernels(stacked.prepared.model)
    seen: list[str] = []

    def noted(function: Any, state: Any) -> Any:
        traced = fuse(trace(function, state))
        seen.extend(str(node.target) for node in traced.graph.nodes)
        return traced

    monkeypatch.setattr("fednorm.engines.stack.program.fuse", lambda traced: traced)
    monkeypatch.setattr("fednorm.engines.stack.program.trace", noted)
    run = tiny.play(stacked)
    assert isinstance(run.server.held, StackSlot)
    assert "fednorm.cross_entropy.default" in seen
    assert gap(tiny.play(reference), run) < 1e-10
