"""Layers on batch statistics: renormalization, static, federated, hybrid and adaptive norms."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.func import functional_call

from fednorm.core import rng
from fednorm.errors import ConfigError
from fednorm.layers.adaptive_gn import AdaptiveGroupNorm, ToAdaptiveGroupNorm
from fednorm.layers.brn import BatchRenorm, ToBatchRenorm
from fednorm.layers.keyed import key_names
from fednorm.layers.scheduled import set_total_steps
from fednorm.layers.shared_stats import FederatedBN, HybridBN, ToFederatedBN, ToHybridBN
from fednorm.layers.static_bn import StaticBN, ToStaticBN

f64 = torch.float64
SHAPES = [(8, 5), (8, 5, 7), (8, 5, 3, 4)]


def data(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return 3 * torch.randn(shape, dtype=f64) + torch.arange(5).reshape(1, 5, *[1] * (len(shape) - 2))


def batch_norm(shape: tuple[int, ...], **options: object) -> nn.Module:
    torch.manual_seed(1)
    layer = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)](5, **options).double()
    if layer.affine:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    return layer


# --- batch renormalization -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_renorm_without_room_is_batch_norm(shape: tuple[int, ...]) -> None:
    old = batch_norm(shape)
    new, report = ToBatchRenorm(total_steps=10, r_max=1.0, d_max=0.0)(copy.deepcopy(old))
    assert report.notes == ("1 BatchNorm layer became BatchRenorm: affine kept, running statistics kept",)
    x = data(shape).requires_grad_()
    for _ in range(12):
        expected, found = old(x), new(x)
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    weights = torch.randn_like(x)
    (expected_grad,) = torch.autograd.grad((expected * weights).sum(), x)
    (found_grad,) = torch.autograd.grad((found * weights).sum(), x)
    assert torch.allclose(found_grad, expected_grad, rtol=0, atol=1e-12)


def test_renorm_unclipped_normalises_with_running_statistics() -> None:
    layer = BatchRenorm(5, total_steps=1, r_max=1e9, d_max=1e9, warmup=0, r_full=0, d_full=0).double()
    layer.running_mean.copy_(torch.randn(5))
    layer.running_std.copy_(torch.rand(5) + 0.5)
    x = data((8, 5, 3, 4))
    expected = copy.deepcopy(layer).eval()(x)
    assert torch.allclose(layer(x), expected, rtol=0, atol=1e-12)


def test_renorm_ramps_by_the_counter_and_tracks_the_deviation() -> None:
    layer = BatchRenorm(5, total_steps=100, r_max=3, d_max=5, warmup=0.2, r_full=0.6, d_full=0.4, momentum=0.1).double()
    far, near = torch.full((5,), 1e6, dtype=f64), torch.full((5,), 1e-6, dtype=f64)
    for step, r_max, d_max in ((0, 1, 0), (20, 1, 0), (30, 1.5, 2.5), (40, 2, 5), (60, 3, 5), (100, 3, 5)):
        layer.num_batches_tracked.fill_(step)
        r, d = layer._correction(far, far)
        assert r.tolist() == pytest.approx([r_max] * 5)
        assert d.tolist() == pytest.approx([d_max] * 5)
        assert layer._correction(near, near)[0].tolist() == pytest.approx([1 / r_max] * 5)
    x = data((8, 5, 3, 4))
    before = copy.deepcopy(layer)
    layer(x)
    std = (x.var((0, 2, 3), correction=0) + 1e-5).sqrt()
    assert torch.allclose(layer.running_std, 0.9 * before.running_std + 0.1 * std, atol=1e-12)
    assert torch.allclose(layer.running_mean, 0.9 * before.running_mean + 0.1 * x.mean((0, 2, 3)), atol=1e-12)
    assert layer.num_batches_tracked.item() == 101


def test_renorm_starts_from_the_statistics_of_the_batch_norm() -> None:
    old = batch_norm((8, 5, 3, 4))
    old(data((8, 5, 3, 4)))
    new, _ = ToBatchRenorm(total_steps=10)(copy.deepcopy(old))
    x = data((8, 5, 3, 4), seed=5)
    assert torch.allclose(new.eval()(x), old.eval()(x), atol=1e-12)


@pytest.mark.parametrize("options", [{"total_steps": 5, "r_max": 0.5}, {"total_steps": 5, "warmup": 0.5}])
def test_renorm_refuses_what_cannot_work(options: dict) -> None:
    with pytest.raises(ConfigError, match="batch renormalization needs"):
        BatchRenorm(5, **options)


def test_a_scheduled_layer_asks_for_the_length_of_the_training() -> None:
    with pytest.raises(ConfigError, match=r"BatchRenorm needs the number of training steps; call set_total_steps"):
        BatchRenorm(5)(torch.randn(4, 5))


# --- static ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_static_norm_trains_on_the_batch_and_is_evaluated_after_a_query(shape: tuple[int, ...]) -> None:
    old = batch_norm(shape, momentum=None)
    new, report = ToStaticBN()(copy.deepcopy(old))
    assert isinstance(new, StaticBN)
    assert "running statistics dropped" in report.notes[0]
    first, second = data(shape), data(shape, seed=9)
    assert torch.allclose(new(first), old(first), atol=1e-12)
    assert torch.equal(new.running_mean, torch.zeros(5, dtype=f64))
    with pytest.raises(ConfigError, match="static BatchNorm has no statistics to evaluate with"):
        new.eval()(first)
    old.reset_running_stats()
    new.train().query = True
    for batch in (first, second):
        new(batch)
        old(batch)
    assert torch.allclose(new.eval()(first), old.eval()(first), atol=1e-12)


# --- shared statistics -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_federated_norm_uses_shared_statistics_and_records_the_batches(shape: tuple[int, ...]) -> None:
    old = batch_norm(shape)
    old(data(shape, seed=4))
    new, _ = ToFederatedBN()(copy.deepcopy(old))
    assert isinstance(new, FederatedBN)
    batches = [data(shape, seed) for seed in range(3)]
    frozen = copy.deepcopy(old).eval()
    for batch in batches:
        assert torch.allclose(new(batch), frozen(batch), atol=1e-12)
    assert torch.equal(new.running_mean, old.running_mean)
    union = torch.cat(batches)
    axes = [0, *range(2, union.dim())]
    assert torch.allclose(new.batch_mean, union.mean(axes), atol=1e-12)
    assert torch.allclose(new.batch_var, union.var(axes, correction=0), atol=1e-12)
    assert new.batch_count.item() == 3
    x = batches[0].requires_grad_()
    weights = torch.randn_like(x)
    (found,) = torch.autograd.grad((new(x) * weights).sum(), x)
    (expected,) = torch.autograd.grad((frozen(x) * weights).sum(), x)
    assert torch.allclose(found, expected, atol=1e-12)


def test_hybrid_norm_mixes_by_the_factor() -> None:
    old = batch_norm((8, 5, 3, 4))
    old(data((8, 5, 3, 4), seed=4))
    new, _ = ToHybridBN()(copy.deepcopy(old))
    assert isinstance(new, HybridBN)
    x = data((8, 5, 3, 4))
    mean = 0.5 * old.running_mean + 0.5 * x.mean((0, 2, 3))
    var = 0.5 * old.running_var + 0.5 * x.var((0, 2, 3), correction=0)
    expected = nn.functional.batch_norm(x, mean, var, old.weight, old.bias, False)
    assert torch.allclose(new(x), expected, atol=1e-12)
    with torch.no_grad():
        new.factor.fill_(60.0)
    assert torch.allclose(new(x), copy.deepcopy(old)(x), atol=1e-12)
    with torch.no_grad():
        new.factor.fill_(-60.0)
    assert torch.allclose(new(x), copy.deepcopy(old).eval()(x), atol=1e-12)
    assert torch.allclose(new.eval()(x), old.eval()(x), atol=1e-12)
    assert torch.equal(new.running_var, old.running_var)


@pytest.mark.parametrize("records", ["mixture", "batch"])
def test_hybrid_norm_records_the_mixture_or_the_batch(records: str) -> None:
    """The second channel leans to the shared statistics (0, 1) with 1 - sigmoid(ln 1/3) = 3/4."""
    new, _ = ToHybridBN(records)(nn.BatchNorm2d(2).double())
    with torch.no_grad():
        new.factor.copy_(torch.tensor([0.0, math.log(1 / 3)], dtype=f64))
    x = data((8, 5, 3, 4))[:, 3:]
    mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
    own = torch.tensor([0.5, 0.25] if records == "mixture" else [1.0, 1.0], dtype=f64)
    new(x)
    assert torch.allclose(new.batch_mean, own * mean, atol=1e-12)
    assert torch.allclose(new.batch_var, 1 - own + own * var, atol=1e-12)
    assert not new.batch_mean.requires_grad


def test_hybrid_factor_learns() -> None:
    new, _ = ToHybridBN()(batch_norm((8, 5, 3, 4)))
    new(data((8, 5, 3, 4))).square().sum().backward()
    assert new.factor.grad.abs().min() > 0


# --- adaptive group norm ---------------------------------------------------------------------------------------------


def choose(layer: AdaptiveGroupNorm, weights: list[float]) -> None:
    layer.choice.copy_(torch.tensor(weights))
    layer.latched.fill_(1)


@pytest.mark.parametrize("shape", [(8, 6), (8, 6, 7), (8, 6, 3, 4)])
def test_adaptive_norm_at_its_ends_is_group_or_batch_norm(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=f64) * 2 + 1
    layer = AdaptiveGroupNorm(2, 6).double()
    set_total_steps(layer, 100)
    choose(layer, [1.0, 0.0])
    assert torch.allclose(layer(x), nn.functional.group_norm(x, 2), atol=1e-12)
    choose(layer, [0.0, 1.0])
    assert torch.allclose(layer(x), nn.functional.batch_norm(x, None, None, training=True), atol=1e-12)
    expected = nn.functional.batch_norm(x, layer.running_mean, layer.running_var)
    assert torch.allclose(layer.eval()(x), expected, atol=1e-12)


def test_adaptive_norm_draws_by_key_and_latches_once_one_hot() -> None:
    model, report = ToAdaptiveGroupNorm()(nn.Sequential(nn.BatchNorm2d(6), nn.BatchNorm2d(9)))
    assert (model[0].groups, model[1].groups, report.changed) == (2, 1, 2)
    names = key_names(model)
    set_total_steps(model, 10**9)  # so long a training that a few steps do not move the temperature
    x = torch.randn(4, 6, 3, 3)

    def drawn(key: int) -> torch.Tensor:
        functional_call(model[0], {"key": rng.key(key)}, (x,))
        model[0].calls = 0
        return model[0].choice.clone()

    assert names == ["0.key", "1.key"]
    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    assert drawn(3).sum().item() == pytest.approx(1)
    assert model[0].latched.item() == 0
    model[0].num_batches_tracked.fill_(10**9)
    latched = drawn(4)
    assert latched.max().item() == 1
    assert model[0].latched.item() == 1
    for key in range(5, 25):
        assert torch.equal(drawn(key), latched)


def test_gumbel_noise_draws_by_the_softmax_of_the_logits() -> None:
    layer = AdaptiveGroupNorm(2, 6)
    layer.logits.data = torch.tensor([0.0, 1.0])
    layer.total_steps, layer.num_batches_tracked = 1, torch.tensor(1)
    wins = 0
    for key in range(1000):
        layer.key, layer.calls = rng.key(key), 0
        wins += int(layer._draw().argmax())
    assert wins / 1000 == pytest.approx(torch.sigmoid(torch.tensor(1.0)).item(), abs=0.05)
