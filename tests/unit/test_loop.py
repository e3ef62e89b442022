"""An own loop gives the engine's numbers, keeps to the rules, and says what it cannot do."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import tiny
from fednorm.core import rng
from fednorm.core.method import Method
from fednorm.core.state import Kind, Tree, digest
from fednorm.errors import ConfigError
from fednorm.halves.loop import load, local_rules, merge, split, update
from fednorm.halves.prepared import prepare
from fednorm.methods import known_methods, parse
from fednorm.pieces.changes import add_transform, keep, merge_by, weigh_by
from fednorm.pieces.weights import ByLoss
from fednorm.running.plan import Plan

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"


def own_loop(made: Plan, optimizer_kept: bool = False) -> tuple[Tree, dict[int, Tree]]:
    """What a user would write, over the batches that the engine would draw; (server, what clients keep)."""
    method, model, rounds = made.method, made.prepared.model, made.config.rounds
    train = made.config.train
    clients = made.federation.training_clients
    server, mine = split(model, method)
    kept = dict.fromkeys(clients, mine)
    used = dict.fromkeys(clients, 0)
    optimizers: dict[int, dict] = {}
    for r in range(1, rounds + 1):
        updates = []
        for c in clients:
            load(model, server, kept[c])
            optimizer = torch.optim.SGD(
                model.parameters(), lr=train.lr, momentum=train.momentum, weight_decay=train.weight_decay
            )
            if optimizer_kept and c in optimizers:
                optimizer.load_state_dict(optimizers[c])
            with local_rules(model, method, round=r, rounds=rounds) as rules:
                for _ in range(made.num_steps(c, made.phases[0])):
                    x, y, _ = made.batches.batch(c, used[c])
                    optimizer.zero_grad()
                    rules.loss(made.task.loss(model(x), y)).backward()
                    rules.step(optimizer)
                    used[c] += 1
            optimizers[c] = optimizer.state_dict()
            shared, kept[c] = split(model, method, round=r, rounds=rounds)
            updates.append(update(c, made.batches.num_examples(c), shared))
        server = merge(updates[::-1], model, method, server=server, round=r, rounds=rounds)
    return server, kept


def farthest(left: Tree, right: Tree) -> float:
    assert left
    return max(float((left[key].double() - right[key].double()).abs().max()) for key in left)


@pytest.mark.parametrize(
    "method", ["fedavg", "fedbn", "silobn", "fixbn", "fedprox(mu=0.5)", "gn", "fixbn(at=1)+fedprox", "agc", "fixup"]
)
def test_an_own_loop_gives_the_engines_numbers(method: str) -> None:
    made = tiny.plan(method)
    run = tiny.play(made)
    server, kept = own_loop(made)
    assert farthest(server, run.server.tree) < 1e-12
    assert set(server) == set(run.server.tree) - set(kept[0])
    for client, mine in kept.items():
        stored = run.store.get(client).tree
        assert mine.keys() == stored.keys()
        assert not mine or farthest(mine, stored) < 1e-12


def test_a_user_who_keeps_the_optimizer_gets_local_momentum() -> None:
    made = tiny.plan("local-momentum")
    server, _ = own_loop(made, optimizer_kept=True)
    assert farthest(server, tiny.play(made).server.tree) < 1e-12
    assert farthest(own_loop(made)[0], server) > 1e-6


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE))
    lines = capsys.readouterr().out.splitlines()
    shares = [int(line.split()[2].rstrip("%")) for line in lines]
    assert len(shares) == 3
    assert min(shares) >= 80


def refusal_of(call: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as refusal:
        call()
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


NET = tiny.conv_net()
BIG = ["centralized", "decoupled", "fedbs", "fedtan", "posthoc", "sbn", "global-momentum", "fixbn(at=window)"]


@pytest.mark.parametrize("method", BIG)
def test_methods_that_need_more_than_a_loop_are_refused(method: str) -> None:
    message = refusal_of(lambda: split(NET, method))
    assert message.startswith(f"'{method}' cannot run in an own loop: it ")
    assert message.endswith("; use fednorm.run instead")


@pytest.mark.parametrize("method", known_methods())
def test_every_method_runs_in_an_own_loop_or_is_refused(method: str) -> None:
    made = tiny.plan(method)
    try:
        server, _ = own_loop(made)
    except ConfigError as refusal:
        assert "cannot run in an own loop" in str(refusal) or "give every update its losses" in str(refusal)  # noqa: PT017
        return
    assert all(bool(value.isfinite().all()) for value in server.values())


def test_reasons_are_given() -> None:
    assert "trains on everybody's data" in refusal_of(lambda: split(NET, "centralized"))
    assert "more than one exchange in a round" in refusal_of(lambda: split(NET, "decoupled"))
    assert "needs all clients in lockstep" in refusal_of(lambda: split(NET, "fedtan"))
    assert "from what clients report" in refusal_of(lambda: split(NET, "fedbs"))
    reported = keep(statistic="reported")(parse("fedavg"))
    assert "does more than train and exchange" in refusal_of(lambda: split(NET, reported))


def test_a_method_with_stages_needs_the_round() -> None:
    def enter(**place: int) -> None:
        with local_rules(NET, "fixbn", **place):
            pass

    message = "'fixbn' changes in the course of a run; give round= and rounds="
    assert refusal_of(enter) == message
    assert refusal_of(lambda: enter(round=3)) == message
    assert refusal_of(lambda: enter(round=5, rounds=4)) == "round=5 is not one of the 4 rounds; count from 1"


def test_surgery_cannot_be_forgotten() -> None:
    assert refusal_of(lambda: split(NET, "fedavg+gn")) == (
        "'fedavg+gn' changes the model's layers first; use `prepare(model, parse('fedavg+gn')).model`"
    )
    ready = prepare(NET, parse("fedavg+gn")).model
    assert set(split(ready, "fedavg+gn")[0]) == set(ready.state_dict())


def test_a_method_with_nothing_to_act_on_is_refused_unless_prepare_was_told() -> None:
    plain = nn.Sequential(nn.Linear(2, 2))
    assert refusal_of(lambda: split(plain, "fedbn")).startswith("'fedbn' finds no BatchNorm layer to act on")
    allowed = prepare(plain, parse("fedbn"), allow_noop=True).model
    assert list(split(allowed, "fedbn")[0]) == ["0.weight", "0.bias"]


def test_split_is_a_partition_and_load_its_inverse() -> None:
    for method in ("fedavg", "silobn", "fedbn", "standalone"):
        shared, mine = split(NET, method)
        assert shared.keys() | mine.keys() == set(NET.state_dict())
        assert not shared.keys() & mine.keys()
        other = tiny.conv_net(seed=5)
        load(other, shared, mine)
        assert digest(other.state_dict()) == digest(NET.state_dict())


def test_split_copies() -> None:
    model = tiny.conv_net()
    shared, _ = split(model, "fedavg")
    before = digest(shared)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.add_(1)
    assert digest(shared) == before


def test_load_refuses_what_does_not_fit_and_then_changes_nothing() -> None:
    model = tiny.conv_net()
    shared, mine = split(model, "fedbn")
    before = digest(model.state_dict())
    moved = {key: value + 1 for key, value in shared.items()}
    assert refusal_of(lambda: load(model, {**moved, "9.weight": torch.zeros(1)}, mine)) == (
        "the model has no '9.weight'; load a tree of this model, after the same surgery"
    )
    assert refusal_of(lambda: load(model, {**moved, "5.bias": torch.zeros(7)}, mine)) == (
        "'5.bias' has shape (7,), the model's has (3,); load a tree of this model"
    )
    assert refusal_of(lambda: load(model, {**moved, **mine}, mine)) == (
        "'1.bias' is in both trees; pass what `merge` and `split` returned for one method"
    )
    assert digest(model.state_dict()) == before


def test_held_statistics_stay_even_if_the_user_calls_train() -> None:
    model = tiny.conv_net()
    norm = model.get_submodule("1")
    before = digest(dict(norm.named_buffers()))
    x, y = tiny.examples(6, 1.0, seed=3)
    with local_rules(model, "fixbn(at=0)", round=1, rounds=2):
        model.train()
        nn.functional.cross_entropy(model(x), y).backward()
    assert digest(dict(norm.named_buffers())) == before
    assert norm.weight.grad is not None
    assert bool((norm.weight.grad != 0).any())
    model.train()(x)
    assert digest(dict(norm.named_buffers())) != before, "the hold ends with the context"


def test_modes_and_gradients_come_back_even_after_an_error() -> None:
    model = tiny.conv_net().train()
    model.get_submodule("5").eval()
    modes = [module.training for module in model.modules()]
    held = parse("fixbn(at=0)").map_rules(lambda rule: replace(rule, hold=frozenset({Kind.AFFINE, Kind.STATISTIC})))
    norm = model.get_submodule("1")
    seen = []

    def interrupted() -> None:
        with local_rules(model, held, round=1, rounds=1):
            seen.append((norm.weight.requires_grad, norm.training))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert seen == [(False, False)]
    assert [module.training for module in model.modules()] == modes
    assert norm.weight.requires_grad
    assert not norm._forward_pre_hooks


def test_a_held_affine_does_not_move() -> None:
    held = parse("fedavg").map_rules(lambda rule: replace(rule, hold=frozenset({Kind.AFFINE})))
    made = tiny.plan(held)
    server, _ = own_loop(made)
    initial = made.initial()
    assert torch.equal(server["bn1.weight"], initial["bn1.weight"])
    assert not torch.equal(server["fc.weight"], initial["fc.weight"])
    assert farthest(server, tiny.play(made).server.tree) < 1e-12


def test_transforms_see_the_optimizers_numbers() -> None:
    seen: dict[str, float] = {}

    def look(grads: Tree, params: Tree, numbers, facts) -> Tree:
        seen.update(numbers)
        return grads

    model = tiny.conv_net()
    with local_rules(model, add_transform(look, bound=3.0)(parse("fedavg"))) as rules:
        rules.step(torch.optim.SGD(model.parameters(), lr=0.25, weight_decay=0.5))
    assert seen == {"lr": 0.25, "momentum": 0.0, "weight_decay": 0.5, "bound": 3.0}


def test_keyed_dropout_draws_anew_in_every_step_and_the_same_for_the_same_key() -> None:
    model = prepare(nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5)), parse("fedavg")).model

    def masks(key: torch.Tensor | None = None) -> list[list[bool]]:
        found = []
        with local_rules(model, "fedavg", key=key) as rules, torch.no_grad():
            for _ in range(2):
                found.append((model(torch.ones(1, 4))[0] == 0).tolist())
                rules.steps += 1
                rules.draw()
        return found

    first, second = masks(rng.key(1))
    assert first != second
    assert masks(rng.key(1)) == [first, second]
    assert masks(rng.key(2))[0] != first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"0.bias": torch.zeros(9).double()}, "client 7: '0.bias' has shape (9,), expected (4,)"),
        ({"0.bias": torch.zeros(4)}, "client 7: '0.bias' has type torch.float32, expected torch.float64"),
        ({"0.bias": torch.full((4,), torch.nan).double()}, "client 7: '0.bias' is not finite"),
        ({"1.running_var": -torch.ones(4).double()}, "client 7: '1.running_var' is negative"),
        ({"extra": torch.zeros(1)}, "client 7: 'extra' was not expected"),
    ],
)
def test_a_bad_update_is_refused_with_client_and_tensor(change: Tree, message: str) -> None:
    shared, _ = split(NET, "fedavg")
    bad = update(7, 4, {**shared, **change})
    both = [update(1, 4, shared), bad]
    assert refusal_of(lambda: merge(both, NET, "fedavg", server=shared)) == f"{message}; its update cannot be merged"


def test_updates_must_be_one_per_client_and_the_server_whole() -> None:
    shared, _ = split(NET, "fedavg")
    twice = [update(2, 4, shared), update(2, 4, shared)]
    assert refusal_of(lambda: merge(twice, NET, "fedavg", server=shared)) == (
        "client 2 sent 2 updates; merge one per client"
    )
    partial = {key: value for key, value in shared.items() if key != "0.bias"}
    assert refusal_of(lambda: merge(twice[:1], NET, "fedavg", server=partial)) == (
        "the server's tree has no '0.bias'; start from split(model, method)[0]"
    )
    assert refusal_of(lambda: merge([], NET, "fedavg", server=shared)) == (
        "there are no updates to merge; at least one client must take part"
    )


def test_methods_that_weigh_or_remember_say_what_is_missing() -> None:
    shared, _ = split(NET, "fedavg")

    def counting(old: Tree, updates, weights, memory: Tree) -> tuple[Tree, Tree]:
        return old, {"count": torch.ones(1)}

    weighing: Method = replace(weigh_by(ByLoss())(parse("fedavg")), name="mine")
    assert refusal_of(lambda: merge([update(0, 4, shared)], NET, weighing, server=shared)) == (
        "'mine' weighs clients by a number that is not reported ('last_epoch'); give every update its losses"
    )
    merge([update(0, 4, shared, {"last_epoch": 1.0})], NET, weighing, server=shared)
    remembering = replace(merge_by(counting, Kind.WEIGHT)(parse("fedavg")), name="mine")
    assert refusal_of(lambda: merge([update(0, 4, shared)], NET, remembering, server=shared)) == (
        "'mine' cannot run in an own loop: it remembers something at the server between rounds; use fednorm.run instead"
    )
