"""What must hold for the numbers of the methods, in float64 and to the bit where that is claimed."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import tiny
from checks import spied, warmed_up
from fednorm.core.state import Kind, Tree, digest, entries, tree_bytes
from fednorm.core.step import training_mode
from fednorm.engines.base import Train
from fednorm.halves.prepared import prepare
from fednorm.halves.prepared_phase import PreparedPhase
from fednorm.halves.training import Job, Outcome
from fednorm.methods import parse
from fednorm.running.plan import Plan
from fednorm.running.run import Run
from fednorm.running.store import Store

EXACT = 1e-12
ONE_STEP = {"train__local_steps": 1, "train__momentum": 0.0, "rounds": 1}


def equal_batches() -> tuple[int, ...]:
    """Sizes for which every client's batch has its own size: weights by size are then weights by batch."""
    return (4, 6, 5)


def union_step(made: Plan, server: Tree, hold: frozenset[Kind] = frozenset()) -> Tree:
    """One centralized SGD step from `server` on the joined batches of all clients, with torch's own optimizer."""
    model = copy.deepcopy(made.prepared.model)
    model.load_state_dict(server, strict=False)
    train = made.config.train
    optimizer = torch.optim.SGD(model.parameters(), lr=train.lr, weight_decay=train.weight_decay)
    x, y = tiny.union_batch(made, 0)
    with training_mode(model, hold):
        made.task.loss(model(x), y).backward()
    optimizer.step()
    return {entry.key: model.state_dict()[entry.key] for entry in entries(model)}


def distance(left: Tree, right: Tree) -> float:
    assert left.keys() == right.keys()
    return max(float((left[key].double() - right[key].double()).abs().max()) for key in left)


def one_round(method: str, model: nn.Module | None = None) -> tuple[Plan, Tree]:
    data = tiny.federation(equal_batches())
    made = tiny.plan(method, data=data, model=model, train__batch_size=6, **ONE_STEP)
    return made, tiny.play(made).server.tree


@pytest.mark.parametrize("method", ["gn", "ln", "in", "gn(groups=4)", "fedprox(mu=1.0)+gn"])
def test_i01_one_step_without_batch_statistics_is_centralized_sgd_on_the_union(method: str) -> None:
    made, merged = one_round(method, tiny.residual_net(widths=(4, 6)))
    assert distance(merged, union_step(made, made.initial())) < EXACT
    assert distance(merged, made.initial()) > 1e-3


def test_i02_fixbn_after_the_freeze_is_centralized_sgd_on_the_union() -> None:
    model = warmed_up(tiny.residual_net(widths=(4, 6)))
    made, merged = one_round("fixbn(at=0)", model)
    centralized = union_step(made, made.initial(), hold=frozenset({Kind.STATISTIC}))
    assert distance(merged, centralized) < EXACT
    affine = [entry.key for entry in made.prepared.entries if entry.kind is Kind.AFFINE]
    assert affine
    assert all(not torch.equal(merged[key], made.initial()[key]) for key in affine)


def test_i02_the_centralized_method_takes_that_step_too() -> None:
    """Centralized FixBN draws its own batch of the union; with one batch an epoch it is the same set of examples."""
    data = tiny.federation(equal_batches())
    model = warmed_up(tiny.residual_net())
    changes = {**ONE_STEP, "train__batch_size": 6}
    federated = tiny.play(tiny.plan("fixbn(at=0)", data=data, model=model, **changes))
    centralized = tiny.play(tiny.plan("centralized+fixbn(at=0)", data=data, model=model, **changes))
    assert distance(federated.server.tree, centralized.server.tree) < EXACT


@pytest.mark.parametrize("kept", ["local-momentum", "global-momentum", ""])
def test_i03_with_maintained_momentum_it_is_centralized_momentum_sgd_and_without_it_is_not(kept: str) -> None:
    model = warmed_up(tiny.residual_net())
    data = tiny.federation(equal_batches())
    method = f"fixbn(at=0)+{kept}".rstrip("+")
    changes = {"train__local_steps": 1, "train__batch_size": 6, "rounds": 4, "train__momentum": 0.9}
    made = tiny.plan(method, data=data, model=model, **changes)
    twin = copy.deepcopy(made.prepared.model)
    train = made.config.train
    optimizer = torch.optim.SGD(twin.parameters(), lr=train.lr, momentum=0.9, weight_decay=train.weight_decay)
    for k in range(4):
        x, y = tiny.union_batch(made, k)
        optimizer.zero_grad()
        with training_mode(twin, frozenset({Kind.STATISTIC})):
            made.task.loss(twin(x), y).backward()
        optimizer.step()
    server = tiny.play(made).server.tree
    gap = distance({entry.key: server[entry.key] for entry in made.prepared.entries}, dict(twin.state_dict()))
    assert gap < EXACT if kept else gap > 1e-4


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "silobn"])
def test_i08_plain_batch_norm_is_not_centralized_sgd(method: str) -> None:
    made, merged = one_round(method)
    weights = [entry.key for entry in made.prepared.entries if entry.kind is Kind.WEIGHT]
    centralized = union_step(made, made.initial())
    assert distance({k: merged[k] for k in weights}, {k: centralized[k] for k in weights}) > 1e-3


def test_i04_after_the_freeze_statistics_and_counters_keep_their_bits() -> None:
    made = tiny.plan("fixbn(at=2)", rounds=5)
    run = Run(made, Store())
    frozen = [e.key for e in made.prepared.entries if e.kind in (Kind.STATISTIC, Kind.COUNTER)]
    seen = []
    for row in run.rounds():
        seen.append((row["stage"], digest({key: run.server.tree[key] for key in frozen})))
    assert [stage for stage, _ in seen] == [0, 0, 1, 1, 1]
    bits = [mark for _, mark in seen]
    assert bits[0] != bits[1]
    assert bits[1] == bits[2] == bits[3] == bits[4]


def test_i04_with_held_statistics_training_mode_computes_what_evaluation_computes() -> None:
    model = warmed_up(tiny.residual_net())
    x = tiny.examples(5, 1.0, seed=9)[0]
    expected = model(x)
    with training_mode(model, frozenset({Kind.STATISTIC})):
        held = model(x)
    with training_mode(model, frozenset()):
        moving = model(x)
    assert torch.equal(held, expected)
    assert not torch.allclose(moving, expected)


def backwards(train: Train) -> Train:
    """Training that is asked and answers in another order."""

    def turned(phase: PreparedPhase, jobs: Sequence[Job], probing: bool = False) -> Iterator[Outcome]:
        worked = list(train(phase, list(jobs)[::-1], probing))
        return iter(worked[1:] + worked[:1])

    return turned


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "fixbn", "fedprox+silobn"])
def test_i05_the_order_of_clients_changes_no_bit_in_float32(method: str) -> None:
    made = tiny.plan(method, train__dtype="float32", data=tiny.federation((8, 12, 9, 7)))
    run = Run(made, Store())
    run.engine.train = backwards(run.engine.train)
    list(run.rounds())
    assert tiny.fingerprint(run) == tiny.fingerprint(tiny.play(made))


def local_training(made: Plan, resets: bool) -> Tree:
    """Client 0 alone with torch's SGD, over the batches that a run gives it."""
    model = copy.deepcopy(made.prepared.model).train()
    train = made.config.train
    optimizer = None
    steps = made.num_steps(0, made.phases[0])
    for round in range(made.config.rounds):
        if optimizer is None or resets:
            optimizer = torch.optim.SGD(
                model.parameters(), lr=train.lr, momentum=train.momentum, weight_decay=train.weight_decay
            )
        for k in range(round * steps, (round + 1) * steps):
            x, y, _ = made.batches.batch(0, k)
            optimizer.zero_grad()
            made.task.loss(model(x), y).backward()
            optimizer.step()
    return {entry.key: model.state_dict()[entry.key] for entry in entries(model)}


ALONE = {"data": tiny.federation((12,)), "rounds": 3}


def whole_state(run: Run) -> Tree:
    """The server's entries with client 0's own in their place."""
    own = run.store.get(0).tree
    return {key: own.get(key, value) for key, value in run.server.tree.items()}


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "silobn", "fixbn(at=1.0)", "fedprox(mu=0.0)"])
def test_i06_one_client_is_plain_local_training_with_the_optimizer_reset(method: str) -> None:
    made = tiny.plan(method, **ALONE)
    state = whole_state(tiny.play(made))
    assert digest(state) == digest(whole_state(tiny.play(tiny.plan("fedavg", **ALONE))))
    assert distance(state, local_training(made, resets=True)) < EXACT


def test_i06_it_is_uninterrupted_training_only_if_momentum_is_zero_or_kept() -> None:
    with_momentum = tiny.plan("fedavg", **ALONE)
    assert distance(tiny.play(with_momentum).server.tree, local_training(with_momentum, resets=False)) > 1e-4
    without = tiny.plan("fedavg", train__momentum=0.0, **ALONE)
    assert distance(tiny.play(without).server.tree, local_training(without, resets=False)) < EXACT
    kept = tiny.plan("standalone", **ALONE)
    final = {key: tiny.play(kept).store.get(0).tree[key] for key in kept.prepared.facts.entries}
    assert distance(final, local_training(kept, resets=False)) < EXACT


@pytest.mark.parametrize("method", ["gn", "ln", "in"])
def test_i07_a_sample_does_not_see_its_batch(method: str) -> None:
    model = prepare(tiny.residual_net(), parse(method)).model.train()
    x = tiny.examples(4, 0.0, seed=1)[0]
    others = torch.cat([x[:1], tiny.examples(3, 5.0, seed=2)[0]])
    assert torch.equal(model(x)[0], model(others)[0])


def test_i07_in_batch_norm_it_does() -> None:
    model = tiny.residual_net().train()
    x = tiny.examples(4, 0.0, seed=1)[0]
    others = torch.cat([x[:1], tiny.examples(3, 5.0, seed=2)[0]])
    assert not torch.allclose(model(x)[0], model(others)[0], atol=1e-2)


@torch.no_grad()
def logits(method: str, x: Tensor) -> Tensor:
    return prepare(tiny.residual_net(), parse(method)).model(x)


def test_i09_group_norm_with_one_group_is_layer_norm_and_with_all_is_instance_norm() -> None:
    x = tiny.examples(4, 0.5, seed=3)[0]
    assert float((logits("gn(groups=1)", x) - logits("ln", x)).abs().max()) < EXACT
    assert float((logits("gn(groups=4)", x) - logits("in", x)).abs().max()) < EXACT
    assert float((logits("gn(groups=2)", x) - logits("ln", x)).abs().max()) > 1e-3


SENT = {
    "fedavg": {Kind.WEIGHT, Kind.AFFINE, Kind.STATISTIC, Kind.COUNTER},
    "fedprox": {Kind.WEIGHT, Kind.AFFINE, Kind.STATISTIC, Kind.COUNTER},
    "fedbn": {Kind.WEIGHT},
    "silobn": {Kind.WEIGHT, Kind.AFFINE},
    "fixbn(at=0)": {Kind.WEIGHT, Kind.AFFINE},
    "gn": {Kind.WEIGHT, Kind.AFFINE},
    "standalone": set(),
}


@pytest.mark.parametrize(("method", "kinds"), SENT.items())
def test_i10_only_the_named_kinds_are_sent_and_their_bytes_counted(method: str, kinds: set[Kind]) -> None:
    made = tiny.plan(method, rounds=1)
    run, spy = spied(made)
    (row,) = run.rounds()
    by_hand = sum(entry.bytes for entry in made.prepared.entries if entry.kind in kinds)
    assert spy.log
    for outcome in (each for exchange in spy.log for each in exchange.outcomes):
        assert {made.prepared.facts.entries[key].kind for key in outcome.update.shared} == kinds
        assert tree_bytes(outcome.update.shared) == by_hand
    assert row["bytes_up"] == by_hand * 3
    frozen = sum(e.bytes for e in made.prepared.entries if e.kind in (Kind.STATISTIC, Kind.COUNTER))
    assert row["bytes_down"] == (by_hand + (frozen if method == "fixbn(at=0)" else 0)) * 3


@pytest.mark.parametrize(("method", "share"), [("silobn", 99.49), ("fedbn", 98.98), ("gn", 99.49)])
def test_i10_resnet20_pays_the_published_share_of_fedavg(method: str, share: float) -> None:
    from fednorm import models

    net = models.build("resnet20", num_classes=10, in_channels=3, image_size=32, seed=0)

    def floats(expression: str) -> int:
        prepared = prepare(net, parse(expression))
        schema = prepared.schema(prepared.method.phases[0])
        return sum(e.bytes // 4 for e, policy in schema.values() if policy == "shared" and e.kind is not Kind.COUNTER)

    assert floats("fedavg") == 271_098
    assert round(100 * floats(method) / floats("fedavg"), 2) == share


@pytest.mark.parametrize("method", ["fedbn", "silobn"])
def test_i11_what_a_client_keeps_is_what_its_training_left(method: str) -> None:
    made = tiny.plan(method, rounds=2, clients_per_round=2)
    run, spy = spied(made)
    left: dict[int, str] = {}
    for row in run.rounds():
        left |= {outcome.update.client: digest(outcome.kept) for outcome in spy.log[-1].outcomes}
        for client in made.federation.training_clients:
            tree = run.store.get(client).tree
            assert (digest(tree) == left[client]) if client in left else (tree == {})
        assert len(row["cohort"]) == 2
    # and the next round starts from it
    states = [run.store.get(client).tree for client in left]
    assert len({digest(tree) for tree in states}) == len(states)


@pytest.mark.parametrize("method", ["fedbn", "silobn", "standalone"])
def test_another_clients_data_reaches_what_a_client_keeps_only_through_what_is_shared(method: str) -> None:
    first = tiny.play(tiny.plan(method, data=tiny.federation((8, 12)), rounds=2))
    other = tiny.play(tiny.plan(method, data=tiny.federation((8, 20)), rounds=2))
    same = digest(first.store.get(0).tree) == digest(other.store.get(0).tree)
    assert same == (method == "standalone")


@pytest.mark.parametrize("seed", [0, 1])
def test_i16_fixbn_that_freezes_after_the_last_round_is_fedavg(seed: int) -> None:
    fixbn = tiny.fingerprint(tiny.play(tiny.plan("fixbn(at=1.0)", seed=seed)))
    assert fixbn == tiny.fingerprint(tiny.play(tiny.plan("fedavg", seed=seed)))
    half = tiny.fingerprint(tiny.play(tiny.plan("fixbn", seed=seed)))
    assert half["server"] != fixbn["server"]


@pytest.mark.parametrize("affine", ["true", "false"])
def test_i16_the_affine_moves_after_the_freeze_unless_it_is_frozen_too(affine: str) -> None:
    made = tiny.plan(f"fixbn(at=2,affine={affine})", rounds=4)
    run = Run(made, Store())
    keys = [entry.key for entry in made.prepared.entries if entry.kind is Kind.AFFINE]
    marks = [digest({key: run.server.tree[key] for key in keys}) for _ in run.rounds()]
    assert marks[0] != marks[1]
    assert (marks[1] == marks[2] == marks[3]) == (affine == "true")


def test_i21_fedprox_without_a_penalty_is_fedavg() -> None:
    assert tiny.fingerprint(tiny.play(tiny.plan("fedprox(mu=0.0)"))) == tiny.fingerprint(tiny.play(tiny.plan("fedavg")))


def test_i21_with_one_step_fedprox_does_not_depend_on_mu() -> None:
    runs = [tiny.play(tiny.plan(m, train__local_steps=1)) for m in ("fedavg", "fedprox(mu=0.1)", "fedprox(mu=10.0)")]
    assert len({digest(run.server.tree) for run in runs}) == 1
    two = [tiny.play(tiny.plan(m, train__local_steps=2)) for m in ("fedavg", "fedprox(mu=0.1)")]
    assert digest(two[0].server.tree) != digest(two[1].server.tree)


def test_i23_dropout_is_part_of_what_resumes(tmp_path) -> None:
    def made() -> Plan:
        return tiny.plan("fedbn", model=nn.Sequential(tiny.conv_net(), nn.Dropout(0.5)), rounds=3)

    expected = tiny.fingerprint(tiny.play(made()))
    first = Store(tmp_path / "state.sqlite")
    tiny.play(made(), first, rounds=1)
    first.close()
    again = Store(tmp_path / "state.sqlite")
    resumed = Run(made(), again)
    assert resumed.round == 1
    list(resumed.rounds())
    assert tiny.fingerprint(resumed) == expected
    again.close()


def test_fedbn_without_batch_norm_and_with_leave_equals_fedavg() -> None:
    def run(method: str) -> Run:
        net = tiny.conv_net(nn.GroupNorm(2, 4))
        return tiny.play(tiny.plan(method, model=net, allow_noop=True))

    assert tiny.fingerprint(run("fedbn")) == tiny.fingerprint(run("fedavg"))


def test_the_layer_norms_of_a_vision_transformer_stay_shared_under_fedbn() -> None:
    from fednorm import models

    net = models.build("vit_tiny", num_classes=3, in_channels=1, image_size=8, seed=0)
    made = tiny.plan("fedbn", model=net, allow_noop=True, rounds=1)
    schema = made.phases[0].schema
    affine = [policy for entry, policy in schema.values() if entry.kind is Kind.AFFINE]
    assert affine
    assert set(affine) == {"shared"}


class Perceptron(nn.Module):
    """A user's own model with BatchNorm1d."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "fixbn", "gn", "ln", "in"])
def test_a_perceptron_with_batch_norm_1d_learns(method: str) -> None:
    torch.manual_seed(0)
    run = tiny.play(tiny.plan(method, model=Perceptron(), rounds=8, train__lr=0.05))
    rows = list(run.store.rows())
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]


def test_the_functional_model_is_the_module() -> None:
    """The engine calls the model with its state as an argument; statistics must move as in the module itself."""
    net = tiny.residual_net()
    twin = copy.deepcopy(net).train()
    x = tiny.examples(6, 0.3, seed=4)[0]
    state = {key: value.clone() for key, value in net.state_dict().items()}
    assert torch.equal(functional_call(net.train(), state, (x,)), twin(x))
    assert digest(state) == digest(twin.state_dict())
