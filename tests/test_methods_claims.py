"""What methods claim for themselves: equal to centralized training where they say so, better where they say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny
from checks import EXACT, WHOLE_BATCHES, centralized_sgd, distance, keys_of, only, spied, warmed_up
from fednorm.core.state import Kind, digest
from fednorm.data.federation import Federation
from fednorm.data.given import from_clients
from fednorm.errors import ConfigError
from fednorm.halves.prepared import prepare
from fednorm.methods import parse
from fednorm.running.plan import Plan
from fednorm.running.run import Run

STATISTICS_HELD = frozenset({Kind.STATISTIC})


def block_net() -> nn.Module:
    return tiny.residual_net(widths=(4, 6))


@pytest.mark.parametrize(
    "method", ["fedwon(use_agc=false)", "fedwon(clip=1e6,residual=nf)", "fixup", "gn+ws", "nonorm+ws(style=scaled)"]
)
def test_i01_without_batch_statistics_one_step_is_centralized_sgd_on_the_union(method: str) -> None:
    made = tiny.plan(method, model=block_net(), train__momentum=0.0, train__lr=0.02, rounds=3, **WHOLE_BATCHES)
    merged = tiny.play(made).server.tree
    assert distance(merged, centralized_sgd(made)) < EXACT
    assert distance(merged, made.initial()) > 1e-4


def test_i01_clipping_acts_on_each_client_and_ends_the_equality() -> None:
    made = tiny.plan("fedwon(clip=0.01)", model=block_net(), train__momentum=0.0, rounds=1, **WHOLE_BATCHES)
    assert distance(tiny.play(made).server.tree, centralized_sgd(made)) > 1e-4


@pytest.mark.parametrize("method", ["fedwon", "fixup", "gn+ws", "nonorm"])
def test_i07_a_sample_does_not_see_its_batch(method: str) -> None:
    model = prepare(block_net(), parse(method)).model.train()
    with torch.no_grad():  # FixUp starts with a classifier of zeros, which would hide everything
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    x = tiny.examples(4, 0.0, seed=1)[0]
    others = torch.cat([x[:1], tiny.examples(3, 5.0, seed=2)[0]])
    assert torch.equal(model(x)[0], model(others)[0])
    assert not torch.equal(model(x)[1], model(others)[1])


@pytest.mark.parametrize("momentum", ["local-momentum", "global-momentum"])
@pytest.mark.parametrize(("host", "hold"), [("fixbn(at=0)", STATISTICS_HELD), ("gn", frozenset())])
def test_i03_maintained_momentum_is_centralized_momentum_sgd(host: str, hold: frozenset[Kind], momentum: str) -> None:
    model = warmed_up(block_net())
    made = tiny.plan(f"{host}+{momentum}", model=model, rounds=4, train__schedule="step", **WHOLE_BATCHES)
    assert made.config.train.momentum > 0
    assert made.config.train.weight_decay > 0
    merged = only(tiny.play(made).server.tree, made.prepared.facts.entries)
    assert distance(merged, centralized_sgd(made, momentum=0.9, hold=hold)) < EXACT


def test_i03_with_the_buffers_reset_every_round_it_is_not() -> None:
    made = tiny.plan("fixbn(at=0)", model=warmed_up(block_net()), rounds=4, **WHOLE_BATCHES)
    assert distance(tiny.play(made).server.tree, centralized_sgd(made, momentum=0.9, hold=STATISTICS_HELD)) > 1e-3


def test_i03_in_float32_four_rounds_stay_within_the_stated_bound() -> None:
    changes = {**WHOLE_BATCHES, "train__dtype": "float32"}
    made = tiny.plan("fixbn(at=0)+global-momentum", model=warmed_up(block_net()), rounds=4, **changes)
    merged = only(tiny.play(made).server.tree, made.prepared.facts.entries)
    assert 0 < distance(merged, centralized_sgd(made, momentum=0.9, hold=STATISTICS_HELD)) < 1e-4


def test_momentum_survives_the_freeze() -> None:
    run, spy = spied(tiny.plan("fixbn(at=1)+local-momentum", rounds=2))
    assert [row["stage"] for row in run.rounds()] == [0, 1]
    before, after = spy.log
    kept = before.outcomes[0].kept
    assert kept
    assert digest(only(after.jobs[0].start, kept)) == digest(kept)


def in_lockstep(rounds: int = 3, **changes: Any) -> dict[str, Any]:
    return {
        "model": block_net(),
        "data": tiny.federation((8, 8, 8)),
        "rounds": rounds,
        "train__local_steps": 1,
        **changes,
    }


def test_i20_fedtan_is_centralized_batch_norm_on_the_union() -> None:
    made = tiny.plan("fedtan", **in_lockstep(train__momentum=0.0))
    merged = tiny.play(made).server.tree
    assert distance(merged, centralized_sgd(made)) < EXACT  # running statistics and counters too
    plain = tiny.plan("fedavg", **in_lockstep(train__momentum=0.0))
    weights = keys_of(plain.prepared.entries, Kind.WEIGHT)
    assert distance(only(tiny.play(plain).server.tree, weights), only(centralized_sgd(plain), weights)) > 1e-2


def test_i20_in_float32_one_step_stays_within_the_stated_bound() -> None:
    made = tiny.plan("fedtan", **in_lockstep(rounds=1, train__momentum=0.0, train__dtype="float32"))
    assert 0 < distance(tiny.play(made).server.tree, centralized_sgd(made)) < 1e-6


@pytest.mark.parametrize("momentum", ["local-momentum", "global-momentum"])
def test_i20_with_maintained_momentum_fedtan_is_centralized_momentum_sgd(momentum: str) -> None:
    made = tiny.plan(f"fedtan+{momentum}", **in_lockstep())
    merged = only(tiny.play(made).server.tree, made.prepared.facts.entries)
    assert distance(merged, centralized_sgd(made, momentum=0.9)) < EXACT


def test_i20_exchanges_and_statistics_of_fedtan() -> None:
    made = tiny.plan("fedtan", **in_lockstep())
    run, spy = spied(made)
    rows = list(run.rounds())
    layers = len([entry for entry in made.prepared.entries if entry.part == "running_mean"])
    assert layers == 6
    assert {row["exchanges"] for row in rows} == {3 * layers + 1}
    statistics = keys_of(made.prepared.entries, Kind.STATISTIC)
    for exchange in spy.log:
        assert len({digest(only(o.update.shared, statistics)) for o in exchange.outcomes}) == 1
    channels = sum(e.bytes for e in made.prepared.entries if e.part == "running_mean")
    assert rows[0]["bytes_up"] == 3 * (4 * channels + sum(entry.bytes for entry in made.prepared.entries))


def test_fedtan_starts_a_new_optimizer_after_the_first_step() -> None:
    """With two steps each is the first of its optimizer, so momentum cannot matter; with three it does."""

    def server(steps: int, momentum: float) -> str:
        made = tiny.plan("fedtan", **in_lockstep(train__local_steps=steps, train__momentum=momentum))
        return digest(tiny.play(made).server.tree)

    servers = [server(steps, momentum) for steps in (2, 3) for momentum in (0.0, 0.9)]
    assert servers[0] == servers[1]
    assert servers[2] != servers[3]


def test_i20_unequal_batches_are_refused() -> None:
    with pytest.raises(ConfigError) as refusal:
        tiny.play(tiny.plan("fedtan", data=tiny.federation((8, 3, 8)), rounds=1))
    assert str(refusal.value) == (
        "'fedtan' steps in lock-step and needs equal batches, but client 1 has 3 examples where client 0 has 4; "
        "lower train.batch_size to 3"
    )


def test_fixbn_after_fedtan_pays_for_one_exchange_only() -> None:
    made = tiny.plan("fixbn(at=1)+fedtan", **in_lockstep(rounds=2))
    first, second = Run(made, tiny.Store()).rounds()
    assert (first["exchanges"], second["exchanges"]) == (19, 1)
    assert second["bytes_up"] < first["bytes_up"]


VARIANTS = {
    "fixbn(at=2)": {Kind.STATISTIC, Kind.COUNTER},
    "fixbn(at=2,affine=true)": {Kind.STATISTIC, Kind.COUNTER, Kind.AFFINE},
    "fixbn(at=2,statistics=false,affine=true)": {Kind.AFFINE},
    "centralized+fixbn(at=2)": {Kind.STATISTIC, Kind.COUNTER},
}


@pytest.mark.parametrize(("method", "frozen"), VARIANTS.items())
def test_i16_what_fixbn_freezes_keeps_its_bits_and_the_rest_moves(method: str, frozen: set[Kind]) -> None:
    made = tiny.plan(method, rounds=4)
    run = Run(made, tiny.Store())
    kinds = (Kind.WEIGHT, Kind.AFFINE, Kind.STATISTIC, Kind.COUNTER)
    keys = {kind: keys_of(made.prepared.entries, kind) for kind in kinds}
    bits = [{kind: digest(only(run.server.tree, keys[kind])) for kind in kinds} for _ in run.rounds()]
    for kind in kinds:
        assert bits[0][kind] != bits[1][kind]
        assert (bits[1][kind] == bits[2][kind] == bits[3][kind]) == (kind in frozen)


@pytest.mark.parametrize("method", list(VARIANTS)[:3])
def test_i16_variants_that_freeze_after_the_last_round_are_fedavg(method: str) -> None:
    late = tiny.fingerprint(tiny.play(tiny.plan(method.replace("at=2", "at=1.0"))))
    assert late == tiny.fingerprint(tiny.play(tiny.plan("fedavg")))


def test_i06_one_client_in_the_first_phase_of_fedbs_is_fedavg() -> None:
    def play(method: str) -> Run:
        return tiny.play(tiny.plan(method, data=tiny.federation((12,)), rounds=4))

    assert digest(play("fedbs").server.tree) == digest(play("fedavg").server.tree)


# -- small problems on which a claim shows --


SCALES, SHIFTS = (0.3, 1.0, 3.0), (-6.0, 0.0, 6.0)


def shifted_federation() -> Federation:
    """Clients that see one problem through different sensors: x = scale * z + shift, the label depends on z."""
    direction = torch.randn(8, generator=torch.Generator().manual_seed(7))

    def examples(client: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
        z = torch.randn(count, 8, generator=torch.Generator().manual_seed(100 * client + seed))
        return SCALES[client] * z + SHIFTS[client], (z @ direction > 0).long()

    clients = range(len(SCALES))
    return from_clients([examples(c, 60, 1) for c in clients], [examples(c, 100, 2) for c in clients], num_classes=2)


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


def own_accuracy(method: str) -> float:
    changes = {"train__local_steps": 8, "train__batch_size": 20, "train__lr": 0.05, "train__weight_decay": 0.0}
    made = tiny.plan(method, model=perceptron(), data=shifted_federation(), rounds=15, eval__every=15, **changes)
    return list(tiny.play(made).store.rows())[-1]["eval"]["own_client"]["accuracy"]


def test_local_statistics_beat_averaged_ones_where_features_shift() -> None:
    fedavg, fedbn, silobn = (own_accuracy(method) for method in ("fedavg", "fedbn", "silobn"))
    assert min(fedbn, silobn) > 85
    assert min(fedbn, silobn) > fedavg + 10


def striped_federation() -> Federation:
    """Images with a horizontal or a vertical bar; every client has both."""

    def examples(client: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(10 * client + seed)
        y = torch.arange(count) % 2
        x = 0.3 * torch.randn(count, 1, 6, 6, generator=generator)
        place = torch.randint(0, 6, (count,), generator=generator)
        for i in range(count):
            x[i, 0, place[i]] += 2 * (1 - y[i])
            x[i, 0, :, place[i]] += 2 * y[i]
        return x, y

    return from_clients([examples(c, 16, 1) for c in (0, 1)], [examples(c, 40, 2) for c in (0, 1)], num_classes=2)


def one_example_at_a_time(method: str) -> Plan:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten()]
    changes = {"train__batch_size": 1, "train__local_steps": 16, "train__lr": 0.05, "train__momentum": 0.0}
    return tiny.plan(
        method, model=nn.Sequential(*layers, nn.Linear(8, 2)), data=striped_federation(), rounds=15, **changes
    )


def test_fedwon_learns_at_batch_size_one() -> None:
    rows = list(tiny.play(one_example_at_a_time("fedwon")).store.rows())
    assert rows[-1]["eval"]["pooled"]["accuracy"] > 90
    assert rows[-1]["train_loss"] < 0.5 * rows[0]["train_loss"]


def test_batch_norm_at_batch_size_one_is_refused() -> None:
    with pytest.raises(ConfigError) as refusal:
        one_example_at_a_time("fedavg")
    assert str(refusal.value) == (
        "train.batch_size=1 cannot train BatchNorm, which needs statistics of at least 2 examples; "
        "use a larger batch, or a method without batch statistics such as fedavg+gn"
    )
