"""Model surgery: what is found, what is kept, what is refused."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

from fednorm.core import rng
from fednorm.errors import ConfigError
from fednorm.layers.brn import ToBatchRenorm
from fednorm.layers.keyed import KeyedDropout, key_names
from fednorm.layers.shared_stats import ToHybridBN
from fednorm.pieces import surgery


def small_net() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Sequential(nn.Conv2d(8, 6, 3), nn.BatchNorm2d(6)),
        nn.Flatten(),
        nn.Linear(6 * 4 * 4, 10),
        nn.BatchNorm1d(10),
        nn.Linear(10, 4),
    ).double()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return net


PLAIN_SWAPS = {
    "gn": surgery.ToGroupNorm(),
    "ln": surgery.ToLayerNorm(),
    "ln_pixel": surgery.ToPixelLayerNorm(),
    "in": surgery.ToInstanceNorm(),
}


@pytest.mark.parametrize("name", PLAIN_SWAPS)
def test_a_sample_does_not_see_its_batch_after_the_swap(name: str) -> None:
    model, report = PLAIN_SWAPS[name](small_net())
    x = torch.randn(5, 3, 6, 6, dtype=torch.float64)
    assert report.changed == 3
    assert torch.allclose(model(x)[:1], model(x[:1]), rtol=0, atol=1e-14)
    before = small_net()
    assert not torch.allclose(before(x)[:2], before(x[:2]), atol=1e-3)


@pytest.mark.parametrize("name", PLAIN_SWAPS)
def test_keys_affine_dtype_and_mode_stay(name: str) -> None:
    before = small_net().eval()
    model, report = PLAIN_SWAPS[name](copy.deepcopy(before))
    expected = {key for key in before.state_dict() if before.state_dict()[key].ndim and "running" not in key}
    assert set(model.state_dict()) == expected
    for key in expected:
        assert torch.equal(model.state_dict()[key], before.state_dict()[key])
    assert all(p.dtype == torch.float64 for p in model.parameters())
    assert not any(module.training for module in model.modules())
    assert "affine kept, running statistics dropped" in report.notes[0]


@given(groups=st.integers(1, 40), channels=st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_group_count_is_the_largest_divisor_not_above_the_wish(groups: int, channels: int) -> None:
    model, _ = surgery.ToGroupNorm(groups)(nn.BatchNorm2d(channels))
    assert isinstance(model, nn.GroupNorm)
    fitting = [g for g in range(1, channels + 1) if channels % g == 0 and g <= groups]
    assert model.num_groups == max(fitting)


def test_one_group_is_layer_norm_and_c_groups_is_instance_norm() -> None:
    x = torch.randn(4, 6, 5, 5, dtype=torch.float64)
    old = nn.BatchNorm2d(6).double()
    nn.init.normal_(old.weight)
    swap = {name: make(copy.deepcopy(old))[0](x) for name, make in PLAIN_SWAPS.items()}
    shape = (x - x.mean((1, 2, 3), keepdim=True)) / (x.var((1, 2, 3), correction=0, keepdim=True) + 1e-5).sqrt()
    assert torch.allclose(swap["ln"], shape * old.weight[:, None, None], atol=1e-12)
    by_channel = nn.functional.instance_norm(x, weight=old.weight, bias=old.bias)
    assert torch.allclose(swap["in"], by_channel, atol=1e-12)
    assert torch.allclose(surgery.ToGroupNorm(6)(copy.deepcopy(old))[0](x), by_channel, atol=1e-12)
    pixel = nn.functional.layer_norm(x.permute(0, 2, 3, 1), (6,), old.weight, old.bias).permute(0, 3, 1, 2)
    assert torch.allclose(swap["ln_pixel"], pixel, atol=1e-12)


@pytest.mark.parametrize("name", ["ln", "ln_pixel", "in"])
def test_vectors_get_layer_norm(name: str) -> None:
    x = torch.randn(4, 6, dtype=torch.float64)
    old = nn.BatchNorm1d(6).double()
    expected = nn.functional.layer_norm(x, (6,), old.weight, old.bias)
    assert torch.allclose(PLAIN_SWAPS[name](copy.deepcopy(old))[0](x), expected, atol=1e-12)


def test_batchnorm1d_on_sequences_is_swapped_over_channels_and_length() -> None:
    x = torch.randn(4, 6, 7, dtype=torch.float64)
    model, _ = surgery.ToLayerNorm()(nn.BatchNorm1d(6).double())
    flat = nn.functional.layer_norm(x.reshape(4, -1), (42,)).reshape(x.shape)
    assert torch.allclose(model(x), flat, atol=1e-12)
    pixel, _ = surgery.ToPixelLayerNorm()(nn.BatchNorm1d(6).double())
    assert torch.allclose(pixel(x).mean(1), torch.zeros(4, 7, dtype=torch.float64), atol=1e-12)


def test_instance_norm_may_be_bare() -> None:
    model, _ = surgery.ToInstanceNorm(affine=False)(nn.Sequential(nn.BatchNorm2d(6).double()))
    x = torch.randn(4, 6, 5, 5, dtype=torch.float64)
    assert not list(model.parameters())
    assert torch.allclose(model(x), nn.InstanceNorm2d(6)(x), atol=1e-12)


def test_instance_norm_refuses_one_pixel() -> None:
    model, _ = surgery.ToInstanceNorm()(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    with pytest.raises(ConfigError, match=re.escape("instance norm '1' sees a map of one pixel")):
        model(torch.randn(2, 3, 3, 3))


def test_shared_modules_are_made_once_and_stay_shared() -> None:
    shared = nn.BatchNorm2d(4)
    model, report = surgery.ToGroupNorm()(nn.ModuleList([shared, nn.Sequential(shared, shared), nn.BatchNorm2d(4)]))
    assert report.changed == 2
    assert model[0] is model[1][0] is model[1][1]
    assert model[0] is not model[2]


def test_tied_affine_stays_tied() -> None:
    net = nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4))
    net[1].weight = net[0].weight
    model, _ = surgery.ToGroupNorm()(net)
    assert model[0].weight is model[1].weight


def test_root_sync_and_affine_free_layers_are_found() -> None:
    root, report = surgery.ToLayerNorm()(nn.SyncBatchNorm(4))
    assert isinstance(root, nn.GroupNorm)
    assert report.changed == 1
    bare, report = surgery.ToLayerNorm()(nn.BatchNorm3d(4, affine=False))
    assert bare.weight is None
    assert report.notes == ("1 BatchNorm layer became LayerNorm: running statistics dropped",)
    assert surgery.ToLayerNorm()(nn.Linear(2, 2))[1] == surgery.SurgeryReport(0, ())


@pytest.mark.parametrize("swap", [*PLAIN_SWAPS.values(), ToBatchRenorm(total_steps=5), ToHybridBN()])
def test_a_gamma_without_beta_gets_none(swap: surgery.Surgery) -> None:
    old = nn.BatchNorm2d(4)
    nn.init.normal_(old.weight)
    old.bias = None  # what `BatchNorm2d(4, bias=False)` makes in torch 2.13
    model, _ = swap(copy.deepcopy(old))
    assert torch.equal(model.weight, old.weight)
    assert model.bias is None
    assert model(torch.randn(3, 4, 2, 2)).shape == (3, 4, 2, 2)


def test_lazy_layers_are_refused() -> None:
    net = nn.Sequential(nn.LazyBatchNorm2d())
    with pytest.raises(ConfigError, match="layer '0' has no shape yet"):
        surgery.ToGroupNorm()(net)


class BatchNormAct2d(nn.BatchNorm2d):
    """The shape of timm's fused layer."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop = nn.Identity()
        self.act = nn.ReLU()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.act(self.drop(super().forward(input)))


class SquareNorm(nn.BatchNorm2d):
    """A BatchNorm with something unknown inside."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.inner = nn.Linear(1, 1)


def test_a_fused_activation_survives_the_swap_and_copies() -> None:
    model, _ = surgery.ToGroupNorm()(BatchNormAct2d(4))
    x = torch.randn(2, 4, 3, 3)
    assert torch.allclose(copy.deepcopy(model)(x), nn.functional.group_norm(x, 2).relu(), atol=1e-6)
    assert set(model.state_dict()) == {"weight", "bias"}
    with pytest.raises(ConfigError, match=r"layer '0' \(SquareNorm\) is a BatchNorm with layers of its own"):
        surgery.ToGroupNorm()(nn.Sequential(SquareNorm(4)))


def test_bad_group_count_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 groups"):
        surgery.ToGroupNorm(0)


# --- dropout ---------------------------------------------------------------------------------------------------------


def test_masks_are_a_function_of_key_layer_and_call() -> None:
    twice = nn.Dropout(0.5)
    model, report = surgery.KeyDropout()(nn.Sequential(twice, twice, nn.Dropout(0.5)))
    assert report.changed == 2
    x = torch.ones(1000)
    first, second, third = model[0](x), model[1](x), model[2](x)
    masks = [first > 0, second > 0, third > 0]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert 0.4 < (masks[a] == masks[b]).double().mean() < 0.6  # independent fair coins agree half the time
    assert torch.equal(model(x), first * second * third)
    assert torch.equal(model(x), model(x))
    assert set(first.unique().tolist()) == {0.0, 2.0}
    names = key_names(model)
    assert names == ["0.key", "2.key"]
    other = functional_call(model, dict.fromkeys(names, rng.key(1)), (x,))
    assert not torch.equal(other, model(x))
    assert model.state_dict() == {}


def test_masks_match_a_loop_under_vmap_and_survive_a_copy() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.3), nn.Linear(7, 7), nn.Dropout(0.6))
    model, _ = surgery.KeyDropout()(model)
    keys = rng.key(torch.arange(4), "step", 3)
    x = torch.randn(4, 6, 5)

    def run(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return functional_call(model, dict.fromkeys(key_names(model), key), (x,))

    stacked = torch.vmap(run)(keys, x)
    for client in range(4):
        assert torch.allclose(stacked[client], run(keys[client], x[client]), atol=1e-6)
        assert torch.equal(stacked[client] == 0, run(keys[client], x[client]) == 0)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x))


def test_dropout_rate_and_scale() -> None:
    layer = KeyedDropout(0.25)
    x = torch.ones(40_000, dtype=torch.float64)
    assert abs(layer(x).mean() - 1) < 0.02
    assert torch.equal(KeyedDropout(0.0)(x), x)
    assert torch.equal(KeyedDropout(1.0)(x), x * 0)
    assert torch.equal(layer.eval()(x), x)


@pytest.mark.parametrize(
    ("layer", "shape", "axes"),
    [
        (nn.Dropout1d, (3, 50, 4), (2,)),
        (nn.Dropout1d, (50, 4), (1,)),
        (nn.Dropout2d, (3, 50, 4, 4), (2, 3)),
        (nn.Dropout3d, (3, 50, 2, 2, 2), (2, 3, 4)),
        (nn.Dropout3d, (50, 2, 2, 2), (1, 2, 3)),
    ],
)
def test_channel_dropout_drops_whole_channels(layer: type[nn.Module], shape: tuple[int, ...], axes: tuple) -> None:
    model, _ = surgery.KeyDropout()(layer(0.5))
    y = model(torch.ones(shape))
    assert torch.equal(y.amax(axes), y.amin(axes))
    assert 0 < (y > 0).double().mean() < 1


def test_layers_that_draw_in_functions_stay_as_they_are() -> None:
    _, report = surgery.KeyDropout()(nn.Sequential(nn.Dropout(), nn.MultiheadAttention(4, 2, dropout=0.1)))
    assert report == surgery.SurgeryReport(1, ("1 dropout layers draw keyed masks",))
