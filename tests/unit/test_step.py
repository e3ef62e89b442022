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
from fednorm.core.optimizers import SGD
from fednorm.core.state import Kind, Tree, digest
from fednorm.core.step import Batch, Carry, ObserveStep, Seen, StepSpec, TrainStep, forward, training_mode
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


def start_of(spec: StepSpec) -> Carry:
    """A client that starts with copies of the model's state."""
    state = {key: value.clone() for key, value in spec.model.state_dict().items() if key in spec.facts.entries}
    params = {key: value for key, value in state.items() if spec.facts.entries[key].trainable}
    rest = {key: value for key, value in state.items() if key not in params}
    return Carry(params=params, state=rest, optimizer={}, extras={}, anchor=dict(params))


def trained(spec: StepSpec, carry: Carry, batch: Batch, **numbers: float) -> tuple[Carry, Seen]:
    """After one step in training mode."""
    with training_mode(spec.model, frozenset()):
        return TrainStep()(spec)(carry, batch, {**NUMBERS, **numbers})


def a_batch(size: int = 6, shift: float = 0.5) -> Batch:
    return Batch(*tiny.examples(size, shift, seed=1), KEY)


def test_a_step_is_torchs_step() -> None:
    spec = spec_of(tiny.residual_net())
    start, batch = start_of(spec), a_batch()
    twin = copy.deepcopy(spec.model).train()
    after, seen = trained(spec, start, batch)
    loss = spec.task.loss(twin(batch.x), batch.y)
    loss.backward()
    torch.optim.SGD(twin.parameters(), lr=0.1, weight_decay=0.01).step()
    assert torch.equal(seen.loss, loss.detach())
    assert seen.probed == {}
    for key, value in twin.state_dict().items():
        assert torch.allclose(after.tree[key], value, rtol=0, atol=1e-14)


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
    start = start_of(spec)
    assert spec.tied
    assert not spec_of(tiny.residual_net()).tied
    twin = copy.deepcopy(spec.model).train()
    x, y = torch.randn(6, 5, dtype=torch.float64), torch.arange(6) % tiny.NUM_CLASSES
    moved, _ = trained(spec, start, Batch(x, y, KEY))
    spec.task.loss(twin(x), y).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1, weight_decay=0.01).step()
    after = twin.state_dict()
    assert "second.weight" not in start.tree
    assert moved.tree.keys() == start.tree.keys() == spec.facts.entries.keys()
    for key, value in moved.tree.items():
        assert torch.allclose(value, after[key], rtol=0, atol=1e-14), key


def test_parameters_are_not_touched_in_place_and_the_model_not_at_all() -> None:
    spec = spec_of(tiny.residual_net())
    start = start_of(spec)
    before, model_before = digest(start.params), digest(spec.model.state_dict())
    after, _ = trained(spec, start, a_batch())
    assert digest(start.params) == digest(start.anchor) == digest(after.anchor) == before
    assert digest(spec.model.state_dict()) == model_before
    assert all(not value.requires_grad for value in after.tree.values())


def test_the_reported_loss_leaves_out_penalties() -> None:
    model = tiny.residual_net()
    plain, prox = spec_of(model), spec_of(model, Rule(losses=(Proximal(),)))
    params = start_of(plain).params
    anchor = {key: value + 1 for key, value in params.items()}
    starts = [start_of(spec)._replace(params=params, anchor=anchor) for spec in (plain, prox)]
    (left, without), (right, with_penalty) = (
        trained(spec, start, a_batch(), **{"prox.mu": 0.5}) for spec, start in zip((plain, prox), starts, strict=True)
    )
    assert torch.equal(without.loss, with_penalty.loss)
    for key, value in params.items():  # the penalty's gradient is mu * (w - anchor) = -0.5
        assert torch.allclose(right.params[key] - left.params[key], torch.full_like(value, 0.05), atol=1e-12)


def test_transforms_chain_in_their_order() -> None:
    def double(grads: Tree, carry: Carry, numbers, facts) -> Tree:
        return {key: 2 * grad for key, grad in grads.items()}

    def add_one(grads: Tree, carry: Carry, numbers, facts) -> Tree:
        return {key: grad + 1 for key, grad in grads.items()}

    moved = {}
    for name, chain in {"none": (), "double, add": (double, add_one), "add, double": (add_one, double)}.items():
        spec = spec_of(tiny.conv_net(), Rule(grads=chain))
        start = start_of(spec)
        after, _ = trained(spec, start, a_batch(), weight_decay=0.0)
        moved[name] = {key: (start.params[key] - value) / 0.1 for key, value in after.params.items()}
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
    after, _ = trained(spec, start_of(spec), a_batch(4, 0.0))
    assert torch.allclose(after.params["idle"], torch.full((2,), 1 - 0.1 * 0.01, dtype=torch.float64))


def test_looking_moves_statistics_and_nothing_else() -> None:
    spec = spec_of(tiny.residual_net())
    start = start_of(spec)
    before, statistics = digest(start.params), digest(start.state)
    with training_mode(spec.model, frozenset()):
        after, _ = ObserveStep()(spec)(start, a_batch(), NUMBERS)
    assert digest(after.params) == before
    assert digest(after.state) != statistics
    assert (after.optimizer, after.extras) == ({}, {})


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
    start, batch = start_of(spec), a_batch(8, 0.0)

    def loss(key: torch.Tensor) -> float:
        with training_mode(spec.model, frozenset({Kind.STATISTIC})):
            return float(TrainStep()(spec)(start, batch._replace(key=key), NUMBERS)[1].loss)

    assert loss(rng.key(1)) == loss(rng.key(1)) != loss(rng.key(2))


def test_a_held_affine_is_not_trained() -> None:
    method = parse("fedavg").map_rules(lambda rule: replace(rule, hold=frozenset({Kind.AFFINE})))
    made = tiny.plan(method)
    run = tiny.play(made)
    initial = made.initial()
    affine = [entry.key for entry in made.prepared.entries if entry.kind is Kind.AFFINE]
    assert affine
    # Equal to what the mean of equal numbers leaves of their last bit.
    tree, rule = run.server.tree, made.phases[0].phase.rule
    assert all(torch.allclose(tree[key], initial[key], rtol=1e-14, atol=0) for key in affine)
    assert all(not torch.equal(tree[e.key], initial[e.key]) for e in made.prepared.trained(rule))


class Failing(nn.Module):
    """A layer with a weight of its own, that may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ValueError("not today")
        return x * self.scale


def test_a_forward_pass_leaves_the_models_own_tensors_in_their_places() -> None:
    failing = Failing()
    spec = spec_of(nn.Sequential(tiny.residual_net(), failing))
    own = {key: (value, value.clone()) for key, value in spec.model.state_dict(keep_vars=True).items()}
    state = {key: value.detach() * 2 for key, (value, _) in own.items()}
    x = a_batch().x
    assert spec.places is not None
    expected = torch.func.functional_call(spec.model, dict(state), (x,))
    assert torch.equal(forward(spec, dict(state), x, KEY), expected)
    assert not torch.equal(spec.model(x), expected)
    vars(spec.model[1])["fails"] = True
    with pytest.raises(ValueError, match=r"^not today$"):
        forward(spec, dict(state), x, KEY)
    after = spec.model.state_dict(keep_vars=True)
    assert all(after[key] is value and torch.equal(value, copied) for key, (value, copied) in own.items())


def test_tensors_with_two_names_are_left_to_torch() -> None:
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    assert spec_of(tied).places is None
    mapped = replace(spec_of(tiny.residual_net()), differentiate=lambda f: f)  # type: ignore[arg-type]
    assert mapped.places is None
