"""The pure optimizers against torch's own."""

from __future__ import annotations

import pytest
import torch

import tiny
from fednorm.core.optim import Optimizer
from fednorm.core.optimizers import ADAM, MOMENTUM_SGD, SGD, make_optimizer
from fednorm.core.state import Kind, Tree, entries

START = {"a": torch.tensor([1.0, -2.0, 0.5]).double(), "b": torch.tensor([[3.0]]).double()}


def gradients(params: Tree, step: int) -> Tree:
    return {key: torch.sin(value * (step + 1)) + 0.1 for key, value in params.items()}


def ours(chosen: Optimizer, numbers: dict[str, float], factors: dict[str, float], steps: int = 5) -> Tree:
    params = dict(START)
    buffers = {f"{part}:{key}": torch.zeros_like(value) for key, value in START.items() for part in chosen.buffers}
    names = set(buffers)
    for step in range(steps):
        params, buffers = chosen.step(params, gradients(params, step), buffers, numbers, factors)
        assert set(buffers) == names
    return params


def torchs(kind: str, numbers: dict[str, float], factors: dict[str, float], steps: int = 5) -> Tree:
    params = {key: value.clone().requires_grad_() for key, value in START.items()}
    groups = [{"params": [p], "lr": numbers["lr"] * factors.get(key, 1.0)} for key, p in params.items()]
    make = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[kind]
    momentum = {"momentum": numbers["momentum"]} if kind == "sgd" else {}
    other = make(groups, weight_decay=numbers["weight_decay"], **momentum)
    for step in range(steps):
        for key, grad in gradients({k: v.detach() for k, v in params.items()}, step).items():
            params[key].grad = grad
        other.step()
    return {key: value.detach() for key, value in params.items()}


@pytest.mark.parametrize("factors", [{}, {"a": 0.1}])
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
@pytest.mark.parametrize(
    ("chosen", "momentum"), [(SGD, 0.0), (MOMENTUM_SGD, 0.9), (ADAM, 0.0)], ids=["sgd", "momentum", "adam"]
)
def test_as_torch(chosen: Optimizer, momentum: float, weight_decay: float, factors: dict[str, float]) -> None:
    numbers = {"lr": 0.1, "momentum": momentum, "weight_decay": weight_decay}
    left, right = ours(chosen, numbers, factors), torchs(chosen.name, numbers, factors)
    for key in START:
        assert torch.allclose(left[key], right[key], rtol=0, atol=1e-14)


def test_inputs_are_left_alone() -> None:
    before = {key: value.clone() for key, value in START.items()}
    buffers = {f"momentum:{key}": torch.ones_like(value) for key, value in START.items()}
    MOMENTUM_SGD.step(START, gradients(START, 0), buffers, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, {})
    assert all(torch.equal(START[key], before[key]) for key in START)
    assert all(bool((value == 1).all()) for value in buffers.values())


def test_by_name() -> None:
    assert make_optimizer("sgd", 0.0) == SGD
    assert make_optimizer("sgd", 0.9) == MOMENTUM_SGD
    assert make_optimizer("adam", 0.9) == ADAM


def test_buffers_are_state_of_their_own_kind() -> None:
    listed = ADAM.entries(entries(torch.nn.Linear(2, 1)))
    assert [entry.key for entry in listed][:3] == ["exp_avg:weight", "exp_avg_sq:weight", "step:weight"]
    assert {entry.kind for entry in listed} == {Kind.OPTIMIZER}
    assert not any(entry.trainable for entry in listed)
    assert listed[0].shape == (1, 2)


def test_vectors_can_be_spared_from_weight_decay() -> None:
    """With no gradient at all a step is weight decay alone: matrices shrink, gamma, beta and biases stay to the bit."""
    made = tiny.plan("fedavg", train__decay_vectors=False, train__momentum=0.0)
    spec = made.step_spec(made.phases[0].passes[0])
    params = {entry.key: made.prepared.initial[entry.key] for entry in made.prepared.entries if entry.trainable}
    still = {key: torch.zeros_like(value) for key, value in params.items()}
    numbers = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.5}
    new, _ = spec.optimizer.step(params, still, {}, numbers, {}, spec.spared)
    for key, value in params.items():
        expected = value if value.dim() < 2 else value * (1 - 0.05)
        assert torch.allclose(new[key], expected, rtol=0, atol=1e-15), key
        assert (key in spec.spared) == (value.dim() < 2)
