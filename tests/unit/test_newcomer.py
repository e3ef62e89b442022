"""Clients that never trained: what their statistics are, and that nothing else depends on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import tiny
from fednorm.core.state import Tree, digest
from fednorm.data.federation import Federation
from fednorm.data.given import from_clients
from fednorm.halves.mine import ClientState
from fednorm.layers.batch_stats import moments
from fednorm.pieces.newcomers import Track
from fednorm.running.evaluate import _own_batches, averaged
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


def newcomer_model(made: Plan, state: Tree, client: int) -> Tree:
    """What the method's rule makes of a state with the data of a client that never trained."""
    spec = made.step_spec(made.evaluated(0).passes[-1])
    return made.method.newcomer.from_data(spec, state, _own_batches(made, client))


@pytest.mark.parametrize("rule", ["adabn", "tsmobn", "tsmobn(momentum=0.5)"])
@pytest.mark.parametrize("host", ["fedavg", "silobn"])
def test_only_the_score_of_the_unseen_changes(host: str, rule: str) -> None:
    plain, ruled = played(host), played(f"{host}+{rule}")
    assert digest(ruled.server.tree) == digest(plain.server.tree)
    before, after = scores(plain), scores(ruled)
    assert before.keys() == after.keys() == {"pooled", "own_client", "unseen"}
    assert all(before[name] == after[name] for name in ("pooled", "own_client"))
    assert before["unseen"]["accuracy"] != after["unseen"]["accuracy"]
    assert after["unseen"]["how"] == ("reestimate" if rule == "adabn" else "track")


def entering_first_norm(made: Plan, state: Tree, x: torch.Tensor) -> torch.Tensor:
    conv = nn.functional.conv2d
    return conv(x, state["0.weight"], state["0.bias"], padding=1)


def test_reestimated_statistics_are_the_moments_of_the_client_s_own_data() -> None:
    run = played("adabn")
    made, state = run.plan, state_of(run)
    new = newcomer_model(made, state, 2)
    mean, var = moments(entering_first_norm(made, state, made.federation.x[made.federation.clients[2]]))
    assert torch.allclose(new["1.running_mean"], mean, rtol=0, atol=1e-12)
    assert torch.allclose(new["1.running_var"], var, rtol=0, atol=1e-12)
    others = state.keys() - {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert all(torch.equal(new[key], state[key]) for key in others)


def test_labels_do_not_matter() -> None:
    run = played("adabn")
    blind = replace(run.plan.federation, y=torch.zeros_like(run.plan.federation.y))
    again = tiny.plan("adabn", data=blind, model=tiny.conv_net(), rounds=4)
    states = [newcomer_model(made, state_of(run), 2) for made in (run.plan, again)]
    assert digest(states[0]) == digest(states[1])


@pytest.mark.parametrize("rest", [0, 1, 2])
def test_a_trailing_example_is_left_out_but_a_lone_one_is_not(rest: int) -> None:
    data = with_newcomer()
    rows = data.clients[2][: 4 + rest]
    data = replace(data, clients=(*data.clients[:2], rows))
    made = tiny.plan("adabn", data=data, model=tiny.conv_net(), rounds=1)
    state = made.initial()
    used = rows[: 4 if rest == 1 else 4 + rest]
    mean, _ = moments(entering_first_norm(made, state, data.x[used]))
    assert torch.allclose(newcomer_model(made, state, 2)["1.running_mean"], mean, rtol=0, atol=1e-12)
    alone = tiny.plan("adabn", data=replace(data, clients=(*data.clients[:2], rows[:1])), model=tiny.conv_net())
    assert all(bool(v.isfinite().all()) for v in newcomer_model(alone, state, 2).values())


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
