"""Entries a method declares for itself, and phases of several passes: SCAFFOLD and head-then-body by hand."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import over_a_wire
import tiny
from checks import distance
from command import fednorm
from fednorm.core.merge import Merge
from fednorm.core.method import Extra, Facts, Method, Numbers, Part, Pass, Phase
from fednorm.core.reductions import weighted_sum, wide
from fednorm.core.registry import register
from fednorm.core.report import Layers, Reports, Uniform
from fednorm.core.state import Kind, Policy, Tree
from fednorm.core.step import Carry, training_mode
from fednorm.methods import known_methods
from fednorm.pieces.phases import with_transform, with_weights
from fednorm.running.plan import Plan

EXACT = 1e-12
DATA = tiny.federation((8, 12, 9, 10))


@dataclass(frozen=True)
class ByControls:
    """g - c_i + c."""

    def __call__(self, grads: Tree, carry: Carry, numbers: Numbers, facts: Facts) -> Tree:
        own, common = (lambda key, name=name: carry.extras[f"{name}:{key}"] for name in ("own", "common"))
        return {key: grad - own(key) + common(key) for key, grad in grads.items()}


@dataclass(frozen=True)
class NewControls:
    """c_i+ = c_i - c + (x - y_i) / (K lr); what goes up under the name of c is c_i+ - c_i (option II of the paper)."""

    def __call__(self, end: Tree, start: Tree, numbers: Numbers, facts: Facts) -> Tree:
        new: Tree = {}
        for name, own in start.items():
            if name.startswith("own:"):
                key = name.removeprefix("own:")
                moved = (start[key] - end[key]) / (numbers["steps"] * numbers["lr"])
                fresh = own - start[f"common:{key}"] + moved
                new |= {name: fresh, f"common:{key}": fresh - own}
        return new


@dataclass(frozen=True)
class Add:
    """c + sum_i p_i dc_i."""

    def __call__(self, old: Tree, clients: Tree, weights: Tensor, memory: Tree) -> tuple[Tree, Tree]:
        return {part: (wide(value) + weighted_sum(clients[part], weights)).to(value) for part, value in old.items()}, {}


@dataclass(frozen=True)
class OneOfAll:
    """p_i = 1 / N, N being all clients of the federation and not those of the round."""

    population: int

    def __call__(self, reports: Reports, layers: Layers | None = None) -> Tensor:
        return torch.full_like(reports.num_examples, 1 / self.population)


@dataclass(frozen=True)
class WithControls:
    population: int

    def __call__(self, method: Method) -> Method:
        return method.map_phases(self.changed)

    def changed(self, phase: Phase) -> Phase:
        add: Merge = Add()
        phase = with_weights(with_transform(phase, ByControls(), {}), Uniform())
        common = Extra(policy=Policy.SHARED, weigh=OneOfAll(self.population), merge=add)
        rule = replace(phase.rule, closings=(NewControls(),))
        return replace(phase, rule=rule, extras={"common": common, "own": Extra(policy=Policy.LOCAL)})


@dataclass(frozen=True)
class HeadThenBody:
    """The last layer first, then all others (as in FedRep)."""

    def __call__(self, method: Method) -> Method:
        return method.map_phases(self.changed)

    def changed(self, phase: Phase) -> Phase:
        head, body = (replace(phase.rule, trains=part) for part in ("head", "body"))
        return replace(phase, rule=head, then=(Pass(rule=body),))


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is registered here is forgotten afterwards."""
    known_methods()
    home = sys.modules["fednorm.core.registry"]
    monkeypatch.setattr(home, "_REGISTRY", dict(vars(home)["_REGISTRY"]))
    register("scaffold", paper="a test", summary="control variates")(lambda: Part(WithControls(len(DATA.clients))))
    register("head-then-body", paper="a test", summary="two passes")(lambda: Part(HeadThenBody()))


def made(method: str, per_round: int, **changes: Any) -> Plan:
    settings = {"data": DATA, "rounds": 5, "clients_per_round": per_round, "train__local_steps": 3, **changes}
    return tiny.plan(method, **{"train__momentum": 0.0, "train__weight_decay": 0.0, **settings})


def trained_by_hand(plan: Plan) -> dict[str, Tensor]:
    """SCAFFOLD as its paper writes it: parameters, and BatchNorm's state averaged beside them."""
    model = copy.deepcopy(plan.prepared.model)
    names = [name for name, _ in model.named_parameters()]
    server = {key: value.clone() for key, value in model.state_dict().items()}
    common = {name: torch.zeros_like(server[name]) for name in names}
    own = {client: {name: torch.zeros_like(server[name]) for name in names} for client in range(len(DATA.clients))}
    used = dict.fromkeys(own, 0)
    cohorts = tiny.Run(plan, tiny.Store()).server
    lr, steps = plan.work.lr, plan.work.amount
    for number in range(1, plan.work.rounds + 1):
        cohort = cohorts.cohort(number, plan.phases[0])
        ends, changes = [], []
        for client in cohort:
            model.load_state_dict(server)
            for _ in range(steps):
                x, y, _ = plan.batches.batch(client, used[client])
                used[client] += 1
                model.zero_grad()
                with training_mode(model, frozenset()):
                    plan.task.loss(model(x), y).backward()
                with torch.no_grad():
                    for name, parameter in model.named_parameters():
                        parameter -= lr * (parameter.grad - own[client][name] + common[name])  # type: ignore[operator]
            ends.append({key: value.clone() for key, value in model.state_dict().items()})
            fresh = {
                name: own[client][name] - common[name] + (server[name] - ends[-1][name]) / (steps * lr)
                for name in names
            }
            changes.append({name: fresh[name] - own[client][name] for name in names})
            own[client] = fresh
        for key, value in server.items():
            stack = torch.stack([end[key] for end in ends])
            server[key] = stack.mean(0) if value.is_floating_point() else stack.amax(0)
        common = {name: common[name] + sum(change[name] for change in changes) / len(own) for name in names}
    return {**server, **{f"common:{name}": value for name, value in common.items()}}


@pytest.mark.parametrize("per_round", [4, 2])
@pytest.mark.parametrize("engine", ["sequential", "stacked", "workers"])
def test_scaffold_equals_a_loop_by_hand(engine: str, per_round: int) -> None:
    plan = made("scaffold", per_round, **tiny.engine(engine))
    run = tiny.play(plan)
    assert distance(run.server.tree, trained_by_hand(plan)) < (EXACT if engine != "stacked" else 1e-10)
    kept = [key for key in run.store.get(run.store.seen()[0]).tree if key.startswith("own:")]
    assert len(kept) == len(list(plan.prepared.model.parameters()))
    run.close()


def test_controls_make_a_difference() -> None:
    plain, controlled = (tiny.play(made(method, 4)).server.tree for method in ("fedavg", "scaffold"))
    assert distance(plain, {key: controlled[key] for key in plain}) > 1e-4


def test_extras_survive_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    first = tiny.play(made("scaffold", 2), tiny.Store(path), rounds=2)
    assert first.round == 2
    first.store.close()
    again = tiny.play(made("scaffold", 2), tiny.Store(path))
    assert tiny.fingerprint(again) == tiny.fingerprint(tiny.play(made("scaffold", 2)))


@pytest.mark.parametrize("method", ["scaffold", "scaffold+fedbn", "scaffold+fixbn", "head-then-body"])
@pytest.mark.parametrize("per_round", [4, 2])
def test_extras_and_passes_cross_the_wire(method: str, per_round: int, tmp_path: Path) -> None:
    plan = made(method, per_round)
    played = over_a_wire.play(plan, tiny.residual_net(), tmp_path)
    assert played.fingerprint == over_a_wire.fingerprint_of(tiny.play(plan))
    assert b"own:conv1.weight" not in b"".join(played.bytes)


def test_extras_and_passes_are_told() -> None:
    told = fednorm("methods", "scaffold+head-then-body")
    assert told.code == 0, told.err
    assert "extras: common (shared, add, one of all (population=4)), own (local, mean, by size)" in told.out
    assert "at its end: new controls" in told.out
    assert "pass 2, trains: the body alone" in told.out


def test_extras_are_charged() -> None:
    plain, controlled = (made(method, 4).phases[0].cost for method in ("fedavg", "scaffold"))
    weights = sum(entry.bytes for entry in made("fedavg", 4).prepared.entries if entry.trainable)
    assert (controlled.up - plain.up, controlled.down - plain.down) == (weights, weights)


def passes_by_hand(plan: Plan, client: int) -> dict[str, Tensor]:
    """One client: all steps on the last layer, then as many on the rest, each group with its own momentum."""
    model = copy.deepcopy(plan.prepared.model)
    last: nn.Module = list(model.modules())[-1]
    head = list(last.parameters())
    body = [parameter for parameter in model.parameters() if all(parameter is not other for other in head)]
    k = 0
    for group in (head, body):
        optimizer = torch.optim.SGD(group, lr=plan.work.lr, momentum=plan.work.momentum)
        for _ in range(plan.work.amount):
            x, y, _ = plan.batches.batch(client, k)
            k += 1
            model.zero_grad()
            with training_mode(model, frozenset()):
                plan.task.loss(model(x), y).backward()
            optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize("engine", ["sequential", "stacked", "workers"])
def test_passes_equal_a_loop_by_hand(engine: str) -> None:
    data = tiny.federation((8, 12))
    plan = made("head-then-body", 2, data=data, rounds=1, train__momentum=0.9, **tiny.engine(engine))
    run = tiny.play(plan)
    first, second = (passes_by_hand(plan, client) for client in (0, 1))
    for key, value in run.server.tree.items():
        if value.is_floating_point():
            torch.testing.assert_close(value, 0.4 * first[key] + 0.6 * second[key], rtol=0, atol=1e-10)
    assert run.store.get(0).steps == 2 * plan.work.amount
    run.close()


def test_only_what_a_pass_trains_is_its_parameters() -> None:
    phase = made("head-then-body", 4).phases[0]
    head, body = ({key for key, part in each.parts.items() if part == "params"} for each in phase.passes)
    assert head == {"fc.weight", "fc.bias"}
    assert not head & body
    assert head | body == {key for key, (entry, _) in phase.schema.items() if entry.trainable}
    assert all(phase.schema[key][0].kind is not Kind.STATISTIC for key in body)
