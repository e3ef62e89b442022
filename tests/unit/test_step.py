"""One client's step: what moves, what does not, and which modes are set."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import tiny
from fednorm.core import rng
from fednorm.core.method import Rule
from fednorm.core.optim import SGD
from fednorm.core.state import Kind, Tree, digest
from fednorm.core.step import StepSpec, observe_step, train_step, training_mode
from fednorm.halves.prepared import prepare
from fednorm.methods import parse
from fednorm.pieces.losses import Proximal
from fednorm.scoring.tasks import Classification

NUMBERS = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.01}
KEY = rng.key(1)


def spec_of(model: nn.Module, rule: Rule | None = None) -> StepSpec:
    prepared = prepare(model, parse("fedavg"))
    return StepSpec(
        model=prepared.model,
        facts=prepared.facts,
        rule=rule or Rule(),
        optimizer=SGD,
        task=Classification(tiny.NUM_CLASSES),
        tied=prepared.tied,
        keyed=prepared.keyed,
    )


def trees_of(spec: StepSpec) -> tuple[Tree, Tree]:
    state = {key: value.clone() for key, value in spec.model.state_dict().items()}
    trained = {key for key, entry in spec.facts.entries.items() if entry.trainable}
    return {k: v for k, v in state.items() if k in trained}, {k: v for k, v in state.items() if k not in trained}


def test_a_step_is_torchs_step() -> None:
    spec = spec_of(tiny.residual_net())
    params, rest = trees_of(spec)
    twin = copy.deepcopy(spec.model).train()
    x, y = tiny.examples(6, 0.5, seed=1)
    with training_mode(spec.model, frozenset()):
        out = train_step(spec)(params, rest, {}, dict(params), x, y, KEY, NUMBERS)
    loss = spec.task.loss(twin(x), y)
    loss.backward()
    torch.optim.SGD(twin.parameters(), lr=0.1, weight_decay=0.01).step()
    assert torch.equal(out.loss, loss.detach())
    for key, value in twin.state_dict().items():
        assert torch.allclose({**out.params, **out.rest}[key], value, rtol=0, atol=1e-14)


class Tied(nn.Module):
    """Two layers with one weight, and a batch norm in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.norm = self.again = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, tiny.NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.again(self.second(self.norm(self.first(x)))))


def test_tied_tensors_move_as_one() -> None:
    torch.manual_seed(0)
    spec = spec_of(Tied().double())
    state = {key: spec.model.state_dict()[key].clone() for key in spec.facts.entries}
    params = {key: value for key, value in state.items() if spec.facts.entries[key].trainable}
    rest = {key: value for key, value in state.items() if key not in params}
    assert spec.tied
    assert not spec_of(tiny.residual_net()).tied
    twin = copy.deepcopy(spec.model).train()
    x, y = torch.randn(6, 5, dtype=torch.float64), torch.arange(6) % tiny.NUM_CLASSES
    with training_mode(spec.model, frozenset()):
        out = train_step(spec)(params, rest, {}, dict(params), x, y, KEY, NUMBERS)
    spec.task.loss(twin(x), y).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1, weight_decay=0.01).step()
    after = twin.state_dict()
    assert "second.weight" not in state
    for key, value in {**out.params, **out.rest}.items():
        assert torch.allclose(value, after[key], rtol=0, atol=1e-14), key


def test_parameters_are_not_touched_in_place_and_the_model_not_at_all() -> None:
    spec = spec_of(tiny.residual_net())
    params, rest = trees_of(spec)
    before, model_before = digest(params), digest(spec.model.state_dict())
    x, y = tiny.examples(6, 0.5, seed=1)
    with training_mode(spec.model, frozenset()):
        out = train_step(spec)(params, rest, {}, dict(params), x, y, KEY, NUMBERS)
    assert digest(params) == before
    assert digest(spec.model.state_dict()) == model_before
    assert all(not value.requires_grad for value in out.params.values())


def test_the_reported_loss_leaves_out_penalties() -> None:
    model = tiny.residual_net()
    plain, prox = spec_of(model), spec_of(model, Rule(losses=(Proximal(),)))
    params, _ = trees_of(plain)
    anchor = {key: value + 1 for key, value in params.items()}
    x, y = tiny.examples(6, 0.5, seed=1)
    outs = []
    for spec in (plain, prox):
        with training_mode(spec.model, frozenset()):
            outs.append(train_step(spec)(params, trees_of(spec)[1], {}, anchor, x, y, KEY, {**NUMBERS, "prox.mu": 0.5}))
    assert torch.equal(outs[0].loss, outs[1].loss)
    for key, value in params.items():  # the penalty's gradient is mu * (w - anchor) = -0.5
        assert torch.allclose(outs[1].params[key] - outs[0].params[key], torch.full_like(value, 0.05), atol=1e-12)


def test_transforms_chain_in_their_order() -> None:
    def double(grads: Tree, params: Tree, numbers, facts) -> Tree:
        return {key: 2 * grad for key, grad in grads.items()}

    def add_one(grads: Tree, params: Tree, numbers, facts) -> Tree:
        return {key: grad + 1 for key, grad in grads.items()}

    x, y = tiny.examples(6, 0.5, seed=1)
    results = {}
    for name, chain in {"none": (), "double, add": (double, add_one), "add, double": (add_one, double)}.items():
        spec = spec_of(tiny.conv_net(), Rule(grads=chain))
        params, rest = trees_of(spec)
        with training_mode(spec.model, frozenset()):
            results[name] = train_step(spec)(
                params, rest, {}, params, x, y, KEY, {**NUMBERS, "weight_decay": 0.0}
            ).params
    moved = {name: {key: (params[key] - value) / 0.1 for key, value in new.items()} for name, new in results.items()}
    for key, grad in moved["none"].items():
        assert torch.allclose(moved["double, add"][key], 2 * grad + 1)
        assert torch.allclose(moved["add, double"][key], 2 * (grad + 1))


def test_a_parameter_that_is_not_used_steps_by_weight_decay_alone() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = tiny.conv_net()
            self.idle = nn.Parameter(torch.ones(2, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    spec = spec_of(Idle())
    params, rest = trees_of(spec)
    x, y = tiny.examples(4, 0.0, seed=1)
    with training_mode(spec.model, frozenset()):
        out = train_step(spec)(params, rest, {}, params, x, y, KEY, NUMBERS)
    assert torch.allclose(out.params["idle"], torch.full((2,), 1 - 0.1 * 0.01, dtype=torch.float64))


def test_looking_moves_statistics_and_nothing_else() -> None:
    spec = spec_of(tiny.residual_net())
    params, rest = trees_of(spec)
    before, statistics = digest(params), digest(rest)
    x, y = tiny.examples(6, 0.5, seed=1)
    with training_mode(spec.model, frozenset()):
        out = observe_step(spec)(params, rest, {}, params, x, y, KEY, NUMBERS)
    assert digest(out.params) == before
    assert digest(out.rest) != statistics


@pytest.mark.parametrize("hold", [frozenset(), frozenset({Kind.STATISTIC}), frozenset({Kind.AFFINE})])
def test_only_batch_norms_leave_training_mode(hold: frozenset[Kind]) -> None:
    model = nn.Sequential(tiny.residual_net(), nn.Dropout(0.5), nn.GroupNorm(1, 3)).eval()
    with training_mode(model, hold):
        for module in model.modules():
            is_held = isinstance(module, nn.BatchNorm2d) and Kind.STATISTIC in hold
            assert module.training != is_held
    assert not any(module.training for module in model.modules())


def test_modes_come_back_after_an_error() -> None:
    model = tiny.residual_net().eval()
    with pytest.raises(RuntimeError), training_mode(model, frozenset()):
        raise RuntimeError
    assert not any(module.training for module in model.modules())


def test_dropout_draws_from_the_key_alone() -> None:
    spec = spec_of(nn.Sequential(tiny.conv_net(), nn.Dropout(0.5)))
    params, rest = trees_of(spec)
    x, y = tiny.examples(8, 0.0, seed=1)

    def loss(key: torch.Tensor) -> float:
        with training_mode(spec.model, frozenset({Kind.STATISTIC})):
            return float(train_step(spec)(params, rest, {}, params, x, y, key, NUMBERS).loss)

    assert loss(rng.key(1)) == loss(rng.key(1)) != loss(rng.key(2))


def test_a_held_affine_is_not_trained() -> None:
    method = parse("fedavg").map_rules(lambda rule: replace(rule, hold=frozenset({Kind.AFFINE})))
    made = tiny.plan(method)
    run = tiny.play(made)
    initial = made.initial()
    affine = [entry.key for entry in made.prepared.entries if entry.kind is Kind.AFFINE]
    assert affine
    # Equal to what the mean of equal numbers leaves of their last bit.
    assert all(torch.allclose(run.server[key], initial[key], rtol=1e-14, atol=0) for key in affine)
    assert all(not torch.equal(run.server[e.key], initial[e.key]) for e in made.prepared.trained(made.phases[0]))
