"""The pure optimizers against torch's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from fednorm.core.optim import Grouped, Joined, Optimizer
from fednorm.core.optimizers import ADAM, MOMENTUM_SGD, SGD, make_optimizer, register_optimizer
from fednorm.core.state import Kind, Tree, entries
from fednorm.errors import ConfigError

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


def torchs(make: Any, numbers: dict[str, float], factors: dict[str, float], steps: int = 5, **options: Any) -> Tree:
    params = {key: value.clone().requires_grad_() for key, value in START.items()}
    groups = [{"params": [p], "lr": numbers["lr"] * factors.get(key, 1.0)} for key, p in params.items()]
    momentum = {"momentum": numbers["momentum"]} if make is torch.optim.SGD else {}
    other = make(groups, weight_decay=numbers["weight_decay"], **momentum, **options)
    for step in range(steps):
        for key, grad in gradients({k: v.detach() for k, v in params.items()}, step).items():
            params[key].grad = grad
        other.step()
    return {key: value.detach() for key, value in params.items()}


@pytest.mark.parametrize("factors", [{}, {"a": 0.1}])
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
@pytest.mark.parametrize(
    ("expression", "momentum", "make", "options"),
    [
        ("sgd", 0.0, torch.optim.SGD, {}),
        ("sgd", 0.9, torch.optim.SGD, {}),
        ("sgd(nesterov=true)", 0.9, torch.optim.SGD, {"nesterov": True}),
        ("adam", 0.0, torch.optim.Adam, {}),
        ("adam(beta1=0.8,beta2=0.9,eps=1e-4)", 0.0, torch.optim.Adam, {"betas": (0.8, 0.9), "eps": 1e-4}),
        ("adamw", 0.0, torch.optim.AdamW, {}),
        ("adamw(beta1=0.8,beta2=0.9,eps=1e-4)", 0.0, torch.optim.AdamW, {"betas": (0.8, 0.9), "eps": 1e-4}),
    ],
)
def test_as_torch(
    expression: str, momentum: float, make: Any, options: Any, weight_decay: float, factors: dict[str, float]
) -> None:
    numbers = {"lr": 0.1, "momentum": momentum, "weight_decay": weight_decay}
    chosen = make_optimizer(expression, momentum)
    left, right = ours(chosen, numbers, factors), torchs(make, numbers, factors, **options)
    for key in START:
        assert torch.allclose(left[key], right[key], rtol=0, atol=1e-14)


@pytest.mark.parametrize("expression", ["sgd", "sgd(nesterov=true)", "adam", "adamw"])
def test_all_parameters_at_once_are_each_alone(expression: str) -> None:
    chosen, numbers = make_optimizer(expression, 0.9), {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05}
    params = {**START, "c": torch.arange(16.0).double().reshape(2, 2, 2, 2)}
    buffers = {f"{part}:{key}": torch.full_like(params[key], 0.25) for key in params for part in chosen.buffers}
    given = (params, gradients(params, 0), buffers, numbers, {"a": 0.1}, frozenset({"b"}))
    for channels_last in (False, True):
        alone, at_once = chosen.step(*given), Joined(chosen, channels_last).step(*given)
        for left, right in zip(alone, at_once, strict=True):
            assert left.keys() == right.keys()
            assert all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_groups_of_parameters_move_to_the_bit_as_each_alone(momentum: float, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = {"a": (7,), "b": (33, 5), "c": (8, 3, 3, 3), "d": (), "e": (41,)}
    params = {key: torch.randn(shape, generator=draw).to(dtype) for key, shape in shapes.items()}
    params["c"] = params["c"].contiguous(memory_format=torch.channels_last)
    chosen, numbers = make_optimizer("sgd", momentum), {"lr": 0.1, "momentum": momentum, "weight_decay": 0.03}
    alone = grouped = params, {f"{part}:{key}": value * 0.3 for key, value in params.items() for part in chosen.buffers}
    assert chosen.together is not None
    together = Grouped(chosen.together, chosen.buffers)
    for step in range(3):
        grads = gradients(alone[0], step)
        rest = (numbers, {"a": 0.1, "b": 0.1}, frozenset({"b", "e"}))
        alone, grouped = (
            chosen.step(alone[0], grads, alone[1], *rest),
            together.step(grouped[0], grads, grouped[1], *rest),
        )
        for left, right in zip(alone, grouped, strict=True):
            assert list(left) == list(right)
            assert all(torch.equal(left[key], right[key]) for key in left)
            assert all(left[key].stride() == right[key].stride() for key in left)


@pytest.mark.parametrize("grouped", [False, True])
def test_inputs_are_left_alone(grouped: bool) -> None:
    before = {key: value.clone() for key, value in START.items()}
    grads = gradients(START, 0)
    same = {key: value.clone() for key, value in grads.items()}
    buffers = {f"momentum:{key}": torch.ones_like(value) for key, value in START.items()}
    assert MOMENTUM_SGD.together is not None
    chosen = Grouped(MOMENTUM_SGD.together, MOMENTUM_SGD.buffers) if grouped else MOMENTUM_SGD
    chosen.step(START, grads, buffers, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, {})
    assert all(torch.equal(START[key], before[key]) for key in START)
    assert all(torch.equal(grads[key], same[key]) for key in START)
    assert all(bool((value == 1).all()) for value in buffers.values())


def test_by_name() -> None:
    assert make_optimizer("sgd", 0.0) == SGD
    assert make_optimizer("sgd", 0.9) == MOMENTUM_SGD
    assert make_optimizer("adam", 0.9) == ADAM
    assert make_optimizer("adam(beta2=0.9)", 0.9) != ADAM


def signs(value: Tensor, grad: Tensor, buffers: Tree, numbers: Any) -> tuple[Tensor, Tree]:
    """Lion, without weight decay."""
    moved = (0.9 * buffers["average"] + 0.1 * grad).sign()
    return value - numbers["lr"] * moved, {"average": 0.99 * buffers["average"] + 0.01 * grad}


def test_one_of_ones_own() -> None:
    @register_optimizer("test-signs")
    def make(scale: float = 1.0) -> Optimizer:
        return Optimizer(signs, ("average",))

    chosen = make_optimizer("test-signs(scale=2)", 0.9)
    assert chosen.name == "test-signs(scale=2)"
    params, buffers = chosen.step(
        {"w": torch.tensor([1.0, 2.0])},
        {"w": torch.tensor([3.0, -4.0])},
        {"average:w": torch.zeros(2)},
        {"lr": 0.5},
        {},
    )
    assert params["w"].tolist() == [0.5, 2.5]
    assert buffers["average:w"].tolist() == pytest.approx([0.03, -0.04])


@pytest.mark.parametrize(
    ("expression", "momentum", "message"),
    [
        ("adamax", 0.0, "optimizer 'adamax' is not known; did you mean 'adam'?"),
        (
            "sgd(nesterov=true)",
            0.0,
            "sgd(nesterov=true) needs momentum, and train.momentum is 0; give --momentum 0.9",
        ),
        ("adam(beta1=1)", 0.0, "optimizer 'adam': beta1=1.0 is out of range; give 0 up to below 1"),
        ("adamw(eps=0)", 0.0, "optimizer 'adamw': eps=0.0 is out of range; give more than 0"),
        ("adam(amsgrad=true)", 0.0, "option of 'adam' 'amsgrad' is not known; known: beta1, beta2, eps."),
        ("sgd(momentum=0.9)", 0.0, "option of 'sgd' 'momentum' is not known; known: nesterov."),
        ("adam+sgd", 0.0, "optimizer 'adam+sgd' names more than one; expected something like adam(beta2=0.99)"),
    ],
)
def test_what_cannot_be_is_refused(expression: str, momentum: float, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        make_optimizer(expression, momentum)
    assert str(refusal.value) == message


def test_buffers_that_were_not_named_are_refused() -> None:
    forgetful = Optimizer(lambda value, grad, buffers, numbers: (value, {"seen": grad}), name="forgetful")
    with pytest.raises(ConfigError) as refusal:
        forgetful.step(START, START, {}, {"lr": 0.1}, {})
    assert str(refusal.value) == (
        "optimizer 'forgetful' returned the buffers ['seen'], expected []; name all of them in Optimizer(buffers=...)"
    )


def test_nesterov_by_a_field_of_its_own() -> None:
    assert tiny.plan("fedavg", train__nesterov=True).optimizer.name == "sgd(nesterov=True)"
    with pytest.raises(ConfigError) as refusal:
        tiny.plan("fedavg", train__nesterov=True, train__optimizer="adam")
    assert str(refusal.value) == (
        "train.nesterov=true is for sgd, and train.optimizer is 'adam'; leave one of the two out"
    )


def test_buffers_are_state_of_their_own_kind() -> None:
    listed = ADAM.entries(entries(torch.nn.Linear(2, 1)))
    assert [entry.key for entry in listed][:3] == ["exp_avg:weight", "exp_avg_sq:weight", "step:weight"]
    assert {entry.kind for entry in listed} == {Kind.OPTIMIZER}
    assert not any(entry.trainable for entry in listed)
    assert listed[0].shape == (1, 2)


@pytest.mark.parametrize("channels_last", [False, True])
def test_joined_parameters_keep_their_own_decay_and_rate(channels_last: bool) -> None:
    """With no gradient a step is v - lr * factor * decay * v: 0.1 * 0.5 of v, the same at half the rate, or nothing."""
    params = {"w": torch.full((2, 1, 1, 2), 4.0), "gamma": torch.tensor([4.0]), "slow": torch.tensor([4.0])}
    numbers = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.5}
    still = {key: torch.zeros_like(value) for key, value in params.items()}
    joined = Joined(SGD, channels_last)
    new, _ = joined.step(params, still, {}, numbers, {"slow": 0.5}, frozenset({"gamma"}))
    assert {key: value.unique().tolist() for key, value in new.items()} == {
        "w": pytest.approx([3.8]),
        "gamma": [4.0],
        "slow": pytest.approx([3.9]),
    }
    assert new["w"].shape == (2, 1, 1, 2)


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


def test_an_update_of_ones_own_takes_the_grouped_one_away_too() -> None:
    """Or else a CPU would move tensors by SGD, whatever the update says."""
    own = replace(MOMENTUM_SGD, update=lambda value, grad, buffers, numbers: (value, buffers))
    assert own.together is None
