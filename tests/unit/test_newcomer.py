"""Clients that never trained: what their statistics are, and that nothing else depends on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import fednorm
import tiny
from fednorm.core.state import Tree, digest
from fednorm.core.step import StepSpec
from fednorm.data.federation import Federation
from fednorm.data.given import from_clients
from fednorm.halves.mine import ClientState
from fednorm.layers.batch_stats import moments
from fednorm.methods import parse
from fednorm.pieces.newcomers import Reestimate, Track
from fednorm.running.evaluate import _own_batches, averaged, newcomer_model
from fednorm.running.plan import Plan
from fednorm.running.run import Run
from fednorm.running.store import Store
from fednorm.running.trained import model_of


def with_newcomer() -> Federation:
    """Two clients that train and one, far away, that never does."""
    shifts = (-1.0, 1.0, 6.0)
    train = [tiny.examples(12, shift, seed=client) for client, shift in enumerate(shifts)]
    test = [tiny.examples(40, shift, seed=client + 100) for client, shift in enumerate(shifts)]
    return replace(from_clients(train, test, num_classes=tiny.NUM_CLASSES), unseen=frozenset({2}))


def played(method: str) -> Run:
    return tiny.play(tiny.plan(method, data=with_newcomer(), model=tiny.conv_net(), rounds=4, eval__every=4))


def scores(run: Run) -> dict[str, Any]:
    return list(run.store.rows())[-1]["eval"]


def state_of(run: Run) -> Tree:
    made = run.plan
    return made.phases[0].start(run.server.tree, {}, made.device)


@pytest.mark.parametrize("rule", ["adabn", "tsmobn", "tsmobn(momentum=0.5)"])
@pytest.mark.parametrize("host", ["fedavg", "silobn(newcomer=mean)"])
def test_only_the_score_of_the_unseen_changes(host: str, rule: str) -> None:
    plain, ruled = played(host), played(f"{host}+{rule}")
    assert digest(ruled.server.tree) == digest(plain.server.tree)
    before, after = scores(plain), scores(ruled)
    assert before.keys() == after.keys() == {"pooled", "own_client", "unseen"}
    assert all(before[name] == after[name] for name in ("pooled", "own_client"))
    assert before["unseen"]["loss"] != after["unseen"]["loss"]
    assert after["unseen"]["how"] == ("reestimate" if rule == "adabn" else "track")


def test_silobn_takes_a_newcomer_s_statistics_from_its_own_data() -> None:
    plain, told = played("silobn"), played("silobn(newcomer=mean)+adabn")
    assert scores(plain)["unseen"] == scores(told)["unseen"]
    assert scores(plain)["unseen"]["how"] == "reestimate"
    assert scores(played("silobn(newcomer=pooled)"))["unseen"]["how"] == "given"
    made, state = plain.plan, state_of(plain)
    others = {key: value * 3 + 1 if "running" in key else value for key, value in state.items()}
    # Whatever the clients' statistics are, and so their mean: the newcomer's say nothing of them.
    assert digest(newcomer_model(made, made.evaluated(0), state, 2)) == digest(
        newcomer_model(made, made.evaluated(0), others, 2)
    )


@pytest.mark.parametrize("expression", ["silobn+tsmobn", "tsmobn+silobn"])
def test_another_part_may_say_what_newcomers_of_silobn_do(expression: str) -> None:
    assert parse(expression).newcomer == Track(0.1)


def test_a_file_says_where_statistics_come_from_that_are_nobody_s_own(tmp_path: Path) -> None:
    data = with_newcomer()
    settings = {"model": tiny.conv_net().float(), "rounds": 1, "local_steps": 1, "batch_size": 4, "device": "cpu"}
    data = replace(data, x=data.x.float(), test_x=data.test_x.float())
    fednorm.run(method="silobn", federation=data, out=tmp_path, **settings)

    def about(client: int | None) -> tuple[str | None, str | None]:
        given = {"client": client, "federation": data, "model": settings["model"]}
        path = fednorm.export(tmp_path, tmp_path / "x.safetensors", **given)
        with safe_open(path, "pt") as file:
            return file.metadata().get("local_entries"), file.metadata().get("newcomers")

    rule = f"reestimate: {Reestimate.__doc__}"
    assert about(None) == ("mean over the clients", rule)
    assert about(0) == (None, None)
    assert about(2) == ("taken from the client's own data", rule)


def entering_first_norm(made: Plan, state: Tree, x: torch.Tensor) -> torch.Tensor:
    conv = nn.functional.conv2d
    return conv(x, state["0.weight"], state["0.bias"], padding=1)


def test_reestimated_statistics_are_the_moments_of_the_client_s_own_data() -> None:
    run = played("adabn")
    made, state = run.plan, state_of(run)
    new = newcomer_model(made, made.evaluated(0), state, 2)
    mean, var = moments(entering_first_norm(made, state, made.federation.x[made.federation.clients[2]]))
    assert torch.allclose(new["1.running_mean"], mean, rtol=0, atol=1e-12)
    assert torch.allclose(new["1.running_var"], var, rtol=0, atol=1e-12)
    others = state.keys() - {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert all(torch.equal(new[key], state[key]) for key in others)


def test_labels_do_not_matter() -> None:
    run = played("adabn")
    blind = replace(run.plan.federation, y=torch.zeros_like(run.plan.federation.y))
    again = tiny.plan("adabn", data=blind, model=tiny.conv_net(), rounds=4)
    states = [newcomer_model(made, made.evaluated(0), state_of(run), 2) for made in (run.plan, again)]
    assert digest(states[0]) == digest(states[1])


@pytest.mark.parametrize("rest", [0, 1, 2])
def test_a_trailing_example_is_left_out_but_a_lone_one_is_not(rest: int) -> None:
    data = with_newcomer()
    rows = data.clients[2][: 4 + rest]
    data = replace(data, clients=(*data.clients[:2], rows))
    made = tiny.plan("adabn", data=data, model=tiny.conv_net(), rounds=1)
    state = made.initial()
    batches = [x for x, _ in _own_batches(made, 2)]
    assert [len(x) for x in batches] == ([4] if rest in (0, 1) else [4, 2])
    mean, _ = moments(entering_first_norm(made, state, torch.cat(batches)))
    assert torch.allclose(newcomer_model(made, made.evaluated(0), state, 2)["1.running_mean"], mean, rtol=0, atol=1e-12)
    alone = tiny.plan("adabn", data=replace(data, clients=(*data.clients[:2], rows[:1])), model=tiny.conv_net())
    assert all(bool(v.isfinite().all()) for v in newcomer_model(alone, alone.evaluated(0), state, 2).values())


def sorted_by_class() -> Federation:
    """A newcomer with 12 rows of each class to train and to test, class after class, as folders of images lie."""
    data = with_newcomer()
    x = torch.randn(36, 1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    y = torch.arange(3).repeat_interleave(12)
    train = [tiny.examples(12, shift, seed=client) for client, shift in enumerate((-1.0, 1.0))]
    test = [tiny.examples(12, shift, seed=client + 100) for client, shift in enumerate((-1.0, 1.0))]
    return replace(from_clients([*train, (x, y)], [*test, (x, y)], num_classes=tiny.NUM_CLASSES), unseen=data.unseen)


def test_data_sorted_by_class_come_in_mixed_batches_drawn_by_the_seed() -> None:
    def batches(seed: int) -> list[list[int]]:
        made = tiny.plan("adabn", data=sorted_by_class(), model=tiny.conv_net(), train__batch_size=12, seed=seed)
        return [y.tolist() for _, y in _own_batches(made, 2)]

    assert all(len(set(labels)) == 3 for labels in batches(0))
    assert sorted(label for labels in batches(0) for label in labels) == [0] * 12 + [1] * 12 + [2] * 12
    assert batches(0) == batches(0) != batches(1)


def test_tracked_tests_come_in_an_order_drawn_by_the_seed() -> None:
    seen: list[torch.Tensor] = []

    class Noting(Track):
        def from_batch(self, spec: StepSpec, state: Tree, x: torch.Tensor) -> Tree:
            seen.append(x)
            return super().from_batch(spec, state, x)

    data = sorted_by_class()
    method = replace(parse("fedavg"), newcomer=Noting())
    tiny.play(tiny.plan(method, data=data, model=tiny.conv_net(), rounds=1, eval__every=1, train__batch_size=12))
    own = data.test_x[data.own_test[2]]
    places = [[int((own == x).flatten(1).all(1).nonzero()) for x in batch] for batch in seen]
    assert sorted(place for batch in places for place in batch) == list(range(36))
    assert all(len({place // 12 for place in batch}) == 3 for batch in places)


def test_tracking_goes_layer_by_layer_in_one_pass() -> None:
    """The second norm sees what the first lets through with statistics that the batch has moved already."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(1), nn.ReLU(), nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(36, 3)).double()
    made = tiny.plan("tsmobn", data=with_newcomer(), model=model, rounds=1)
    state, x = made.initial(), made.federation.test_x[:8].double()
    assert Track() == Track(momentum=0.1), "TsmoBN's"
    moved = Track(0.25).from_batch(made.step_spec(made.phases[0].passes[0]), state, x)
    first_mean, first_var = 0.25 * x.mean(), 0.75 + 0.25 * x.var(correction=0)  # from (0, 1)
    entering = ((x - first_mean) / (first_var + 1e-5).sqrt() * state["0.weight"] + state["0.bias"]).relu()
    expected = {
        "0.running_mean": first_mean,
        "0.running_var": first_var,
        "2.running_mean": 0.25 * entering.mean(),
        "2.running_var": 0.75 + 0.25 * entering.var(correction=0),
    }
    for key, value in expected.items():
        assert moved[key].item() == pytest.approx(value.item(), rel=1e-12)


@pytest.mark.parametrize(
    ("method", "spread", "mean_of_both", "pooled"),
    [
        # Client 0 has mean 1 and variance 4, client 1 mean 5 and variance 16: in the mixture (4 + 16) / 2 + 2 * 2.
        ("silobn", "running_var", 10.0, 14.0),
        # The same as deviations, 2 and 4; the mixture's is the root of its variance.
        ("silobn+brn", "running_std", 3.0, 14.0**0.5),
    ],
)
def test_variances_kept_local_average_as_told(method: str, spread: str, mean_of_both: float, pooled: float) -> None:
    own = {"running_mean": (1.0, 5.0), "running_var": (4.0, 16.0), "running_std": (2.0, 4.0)}
    for rule, expected in (("mean", mean_of_both), ("pooled", pooled)):
        made = tiny.plan(
            method.replace("silobn", f"silobn(newcomer={rule})"), data=with_newcomer(), model=tiny.conv_net()
        )
        store, phase = Store(), made.phases[0]
        entries = [phase.schema[key][0] for key in phase.kept]
        for client in (0, 1):
            tree = {e.key: torch.full(e.shape, own.get(e.part, (3, 8))[client], dtype=e.dtype) for e in entries}
            store.put(client, ClientState(1, tree))
        found = averaged(made, phase, store)
        assert found["1.running_mean"].tolist() == [3.0] * 4
        assert found[f"1.{spread}"].tolist() == pytest.approx([expected] * 4)
        assert found["1.num_batches_tracked"].item() == 8


def test_a_client_that_never_trained_is_handed_what_a_newcomer_gets() -> None:
    """The mean of what others keep, and neither the server's first values nor one client's own."""
    run = played("fedbn")
    trained, newcomer, everybody = (model_of(run.plan, run.store, client) for client in (0, 2, None))
    assert digest(newcomer) == digest(everybody) != digest(trained)
    kept = [run.store.get(client).tree["1.running_mean"] for client in (0, 1)]
    assert torch.allclose(newcomer["1.running_mean"], (kept[0] + kept[1]) / 2, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("method", "part"), [("tsmobn", "running_var"), ("brn+tsmobn", "running_std")])
def test_a_batch_moves_statistics_by_the_momentum(method: str, part: str) -> None:
    made = tiny.plan(method, data=with_newcomer(), model=tiny.conv_net(), rounds=1)
    state = made.initial()
    x = made.federation.test_x[:8].double()
    moved = Track(0.25).from_batch(made.step_spec(made.phases[0].passes[0]), state, x)
    mean, var = moments(entering_first_norm(made, state, x))
    spread = var if part == "running_var" else (var + 1e-5).sqrt()
    for key, fresh in (("1.running_mean", mean), (f"1.{part}", spread)):
        assert torch.allclose(moved[key], 0.75 * state[key] + 0.25 * fresh, rtol=0, atol=1e-12)
    changed = {key for key in state if not torch.equal(moved[key], state[key])}
    assert changed == {"1.running_mean", f"1.{part}"}
    assert digest(state) == digest(made.initial())
