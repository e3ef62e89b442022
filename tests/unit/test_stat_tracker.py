"""Layers that only watch: what they track, where surgery puts them, and who sees what they tracked."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tiny
from fednorm.core.state import Kind, Policy, entries, is_batch_norm
from fednorm.errors import ConfigError
from fednorm.halves.prepared import prepare
from fednorm.layers.sample_norms import PixelLayerNorm
from fednorm.layers.stat_tracker import StatTracker, Track, Tracked
from fednorm.methods import parse


def test_it_is_the_identity_and_tracks_mean_and_biased_variance() -> None:
    layer = StatTracker(2, momentum=0.25)
    x = torch.tensor([[1.0, 10.0], [3.0, 10.0]])
    assert layer(x) is x
    assert layer.running_mean.tolist() == [0.25 * 2, 0.25 * 10]
    assert layer.running_var.tolist() == [0.75 + 0.25 * 1, 0.75]
    layer.eval()
    assert layer(10 * x).equal(10 * x)
    assert layer.running_mean.tolist() == [0.5, 2.5]


def test_channels_may_be_the_last_axis() -> None:
    layer = StatTracker(3, momentum=1.0, axis=-1)
    x = torch.arange(12.0).reshape(2, 2, 3)
    layer(x)
    assert layer.running_mean.equal(x.mean((0, 1)))
    assert layer.running_var.equal(x.var((0, 1), correction=0))


def test_no_gradient_flows_into_the_statistics() -> None:
    x = torch.randn(4, 2, requires_grad=True)
    layer = StatTracker(2)
    layer(x).sum().backward()
    assert not layer.running_mean.requires_grad
    assert x.grad is not None
    assert x.grad.equal(torch.ones(4, 2))


def test_its_tensors_are_statistics_by_type_and_it_is_no_batch_norm() -> None:
    listing = entries(nn.Sequential(nn.Linear(2, 3), StatTracker(3)))
    assert {entry.key: entry.kind for entry in listing if entry.layer == "1"} == {
        "1.running_mean": Kind.STATISTIC,
        "1.running_var": Kind.STATISTIC,
    }
    assert not is_batch_norm(StatTracker(3))
    assert not any(entry.batch_norm for entry in listing)


def trackers(model: nn.Module) -> dict[str, tuple[int, int]]:
    return {n: (m.num_features, m.axis) for n, m in model.named_modules() if isinstance(m, StatTracker)}


def test_surgery_replaces_batch_norms_and_watches_other_norms() -> None:
    norms = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), PixelLayerNorm(4), nn.LayerNorm([4, 2, 2])
    )
    model, report = Track()(norms)
    assert trackers(model) == {
        "1": (4, 1),
        "2.tracker": (4, 1),
        "3.tracker": (4, 1),
        "4.tracker": (4, -3),
    }
    assert report.changed == 4
    assert report.notes == (
        "1 BatchNorm layer became StatTracker: affine dropped, running statistics dropped",
        "3 layers have a StatTracker behind them",
    )


def test_a_network_without_norms_is_watched_behind_its_convolutions_or_linear_layers() -> None:
    convs = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 5, 3), nn.Flatten(), nn.Linear(5, 2))
    assert trackers(Track()(convs)[0]) == {"0.tracker": (4, 1), "1.tracker": (5, 1)}
    linears = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    assert trackers(Track()(linears)[0]) == {"0.tracker": (4, -1)}
    assert Track()(nn.Sequential(nn.Linear(3, 4)))[1].changed == 0


@pytest.mark.parametrize("momentum", [0.0, -0.1, 1.5])
def test_a_momentum_that_tracks_nothing_is_refused(momentum: float) -> None:
    with pytest.raises(ConfigError, match=f"trackers with momentum={momentum} cannot work; give more than 0, up to 1"):
        parse(f"tracker(momentum={momentum})")


def test_the_type_of_number_and_the_mode_are_the_model_s() -> None:
    model = Track()(tiny.conv_net(nn.GroupNorm(1, 4)).eval())[0]
    (watched,) = [module for module in model.modules() if isinstance(module, Tracked)]
    assert not watched.training
    assert watched.tracker.running_mean.dtype is torch.float64  # type: ignore[union-attr]


def test_statistics_are_reported_and_weights_shared() -> None:
    prepared = prepare(tiny.residual_net(), parse("tracker"))
    schema = prepared.schema(prepared.method.phases[0])
    policies = {policy for entry, policy in schema.values() if entry.kind is Kind.STATISTIC}
    assert policies == {Policy.REPORTED}
    assert schema["conv1.weight"][1] is Policy.SHARED


def test_a_method_that_keeps_statistics_and_trackers_do_not_combine() -> None:
    with pytest.raises(ConfigError, match="'fedbn' and 'tracker' cannot be combined: both decide the policy of stat"):
        parse("fedbn+tracker")
    with pytest.raises(ConfigError, match="its last exchange would average the statistic that clients keep local"):
        parse("tracker+posthoc")


@pytest.mark.parametrize(
    ("method", "engine"),
    [
        ("gn+tracker", "stacked"),
        ("fedwon+tracker", "stacked"),
        ("tracker+label-counts", "stacked"),
        ("tracker+label-counts", "workers"),
    ],
)
def test_every_engine_tracks_the_same(method: str, engine: str) -> None:
    data = tiny.federation((8, 8, 8))
    reference = tiny.play(tiny.plan(method, data=data, engine__name="sequential", rounds=2))
    other = tiny.play(tiny.plan(method, data=data, rounds=2, **tiny.engine(engine)))
    for client in range(3):
        mine, theirs = reference.store.get(client).tree, other.store.get(client).tree
        assert mine
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert torch.allclose(value, theirs[key], rtol=1e-9, atol=1e-12), key


def test_labels_are_counted_over_a_client_s_life_and_never_averaged() -> None:
    data = tiny.federation((8, 12, 9))
    run = tiny.play(tiny.plan("label-counts", data=data, rounds=2, train__local_steps=None, train__local_epochs=1))
    for client, rows in enumerate(data.clients):
        seen = torch.bincount(data.y[rows], minlength=tiny.NUM_CLASSES) * 2
        # a trailing batch of one example is left out of an epoch
        short = float(seen.sum() - run.store.get(client).tree["label_counts.counts"].sum())
        assert short == (2 if len(rows) % 4 == 1 else 0)
    assert run.server.tree["label_counts.counts"].tolist() == [0.0] * tiny.NUM_CLASSES


def test_a_model_s_own_buffers_are_not_reported_along_with_counts() -> None:
    model = tiny.conv_net()
    model.register_buffer("scale", torch.ones(1, dtype=torch.float64))
    with pytest.raises(ConfigError, match="'label-counts' would report the model's own buffer 'scale' too"):
        prepare(model, parse("label-counts"))


@pytest.mark.parametrize(("method", "reported"), [("fedbn", {"affine", "statistic"}), ("silobn", {"statistic"})])
def test_batch_norms_may_be_reported_in_place_of_local(method: str, reported: set[str]) -> None:
    phase = parse(f"{method}(report=true)").phases[0]
    assert {kind.value for kind, policy in phase.policy.items() if policy is Policy.REPORTED} == reported


def test_what_was_only_watched_makes_no_model_a_client_s_own() -> None:
    run = tiny.play(tiny.plan("tracker+label-counts", rounds=1, eval__every=1))
    (row,) = run.store.rows()
    assert row["eval"]["pooled"]["how"] == "global model"
