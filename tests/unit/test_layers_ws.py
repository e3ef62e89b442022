"""Weight standardisation, norm-free networks and feature norm."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from fednorm.errors import ConfigError
from fednorm.layers.norm_free import DropNorms, NormaliseFeatures, NormFreeBlock, ScaleResiduals
from fednorm.layers.ws_conv import RELU_GAIN, StandardiseWeights, WSConv2d
from fednorm.models.mobilenet import mobilenet_v2
from fednorm.models.resnet import resnet18, resnet20, small_resnet

f64 = torch.float64


def make(style: str, groups: int = 1, **options: object) -> WSConv2d:
    torch.manual_seed(1)
    return WSConv2d(6, 12, 3, groups=groups, style=style, **options).double()


def test_the_gain_is_that_of_the_paper() -> None:
    assert abs(RELU_GAIN - 1.7128585504496627) < 1e-15


@pytest.mark.parametrize("groups", [1, 6])
def test_scaled_rows_have_mean_zero_and_norm_gain(groups: int) -> None:
    weight = make("scaled", groups).standardised_weight().flatten(1)
    assert torch.allclose(weight.mean(1), torch.zeros(12, dtype=f64), atol=1e-12)
    assert torch.allclose(weight.norm(dim=1), torch.full((12,), RELU_GAIN, dtype=f64), atol=1e-10)


def test_qiao_rows_have_unbiased_deviation_one_up_to_eps() -> None:
    layer = make("qiao")
    rows = layer.weight.flatten(1)
    expected = (rows - rows.mean(1, keepdim=True)) / (rows.std(1, keepdim=True) + 1e-5)
    assert torch.allclose(layer.standardised_weight().flatten(1), expected, atol=1e-10)


@pytest.mark.parametrize("style", ["scaled", "qiao"])
def test_output_is_the_convolution_with_explicit_weights(style: str) -> None:
    layer = make(style)
    x = torch.randn(2, 6, 5, 5, dtype=f64)
    expected = nn.functional.conv2d(x, layer.standardised_weight(), layer.bias)
    assert torch.allclose(layer(x), expected, atol=1e-12)


def test_scaled_is_invariant_to_scale_and_shift_of_the_raw_weight() -> None:
    layer, other = make("scaled"), make("scaled")
    with torch.no_grad():
        other.weight.mul_(3.7).add_(-0.4)
    assert torch.allclose(layer.standardised_weight(), other.standardised_weight(), atol=1e-10)


def test_gradient_sums_to_zero_and_is_orthogonal_to_the_centred_weight() -> None:
    layer = make("scaled")
    layer(torch.randn(3, 6, 5, 5, dtype=f64)).sin().sum().backward()
    gradient = layer.weight.grad.flatten(1)
    centred = (layer.weight - layer.weight.mean((1, 2, 3), keepdim=True)).flatten(1)
    assert gradient.abs().max() > 1e-3
    assert torch.allclose(gradient.sum(1), torch.zeros(12, dtype=f64), atol=1e-10)
    assert torch.allclose((gradient * centred).sum(1), torch.zeros(12, dtype=f64), atol=1e-10)


def test_variance_survives_relu_and_scaled_convolutions() -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 256, 8, 8, dtype=f64)
    layer = WSConv2d(256, 256, 1, bias=False, style="scaled").double()
    assert layer(x.relu()).var().item() == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("style", ["scaled", "qiao"])
def test_a_constant_filter_gives_finite_gradients(style: str) -> None:
    layer = make(style, groups=6)
    nn.init.constant_(layer.weight, 0.3)
    layer(torch.randn(2, 6, 5, 5, dtype=f64)).sum().backward()
    assert torch.isfinite(layer.weight.grad).all()


def test_learnable_gain_is_a_parameter_of_each_channel() -> None:
    model, report = StandardiseWeights("scaled", learnable_gain=True)(nn.Sequential(nn.Conv2d(3, 4, 3).double()))
    assert dict(model.named_parameters())["0.channel_gain"].shape == (4, 1, 1, 1)
    assert model[0].channel_gain.dtype is f64
    assert report.notes == ("1 convolutions use standardised weights (scaled)",)


def test_surgery_keeps_raw_tensors_and_settings_and_leaves_linear_alone() -> None:
    conv = nn.Conv2d(4, 8, 3, stride=2, padding=1, dilation=2, groups=2, padding_mode="reflect")
    net = nn.Sequential(conv, nn.Flatten(), nn.Linear(8, 2))
    state = {key: value.clone() for key, value in net.state_dict().items()}
    model, _ = StandardiseWeights("qiao")(net)
    assert isinstance(model[0], WSConv2d)
    assert type(model[2]) is nn.Linear
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    x = torch.randn(2, 4, 9, 9)
    padded = nn.functional.pad(x, (1, 1, 1, 1), mode="reflect")
    expected = nn.functional.conv2d(padded, model[0].standardised_weight(), conv.bias, 2, 0, 2, 2)
    assert torch.allclose(model[0](x), expected, atol=1e-6)


def test_single_weight_filters_stay_and_are_reported() -> None:
    model, report = StandardiseWeights("qiao")(nn.Sequential(nn.Conv2d(1, 4, 1), nn.Conv2d(4, 4, 3)))
    assert type(model[0]) is nn.Conv2d
    assert report.changed == 1
    assert report.notes[1] == "1 convolutions with one weight a filter left as they are"


class PaddedConv(nn.Conv2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.pad(input, (1, 0, 1, 0)))


def test_what_cannot_be_standardised_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"layer '0' \(PaddedConv\) is a convolution with a forward"):
        StandardiseWeights()(nn.Sequential(PaddedConv(1, 2, 2)))
    with pytest.raises(ConfigError, match="'qiaoo' is not known; did you mean 'qiao'"):
        StandardiseWeights("qiaoo")


def test_parameter_counts_of_fedwon() -> None:
    def count(model: nn.Module, add_bias: bool) -> int:
        for operate in (DropNorms(add_bias), StandardiseWeights("scaled")):
            model, _ = operate(model)
        return sum(p.numel() for p in model.parameters())

    with torch.device("meta"):
        assert count(resnet18(10, 3, stem="imagenet"), True) == 11_176_842
        assert count(resnet18(10, 3, stem="imagenet"), False) == 11_172_042
        assert count(mobilenet_v2(10, 3), True) == 2_219_626
        assert count(mobilenet_v2(10, 3), False) == 2_202_570
    assert count(resnet20(10, 3), False) == 268_346


def test_drop_norms_reports_and_leaves_norm_free_models_alone() -> None:
    _, report = DropNorms()(small_resnet(4, 1))
    assert report.changed == 9
    assert report.notes[1] == "9 convolutions gained a bias of zero"
    plain = nn.Conv2d(1, 1, 3, bias=False)
    assert DropNorms()(plain)[1].changed == 0
    assert plain.bias is None


def test_norm_free_blocks_track_the_expected_variance() -> None:
    before = resnet18(4, 3)
    keys = list(before.state_dict())
    model, report = ScaleResiduals("nf")(before)
    betas = [module.beta**2 for module in model.modules() if isinstance(module, NormFreeBlock)]
    assert betas == pytest.approx([1, 1.04, 1.08, 1.04, 1.08, 1.04, 1.08, 1.04])
    assert report.changed == 8
    assert list(model.state_dict()) == keys


def test_norm_free_block_computes_its_formula() -> None:
    torch.manual_seed(0)
    model = DropNorms()(small_resnet(4, 1).double())[0]
    x = torch.randn(2, 8, 7, 7, dtype=f64)
    block = model.layer1[0]
    wrapped = NormFreeBlock(block, alpha=0.2, beta=1.3)
    assert torch.allclose(wrapped(x), (x + 0.2 * block.main(x / 1.3)).relu(), atol=1e-12)
    down = NormFreeBlock(model.layer2[0], alpha=0.2, beta=1.3)
    expected = (model.layer2[0].shortcut(x / 1.3) + 0.2 * model.layer2[0].main(x / 1.3)).relu()
    assert torch.allclose(down(x), expected, atol=1e-12)
    assert ScaleResiduals("plain")(model)[1].changed == 0
    with pytest.raises(ConfigError, match="'skip' is not known"):
        ScaleResiduals("skip")


def test_feature_norm_scales_the_input_of_the_last_linear_layer() -> None:
    net = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3)).double()
    x = torch.randn(4, 5, dtype=f64)
    feature = net[:2](x)
    expected = net[2](feature / feature.norm(dim=1, keepdim=True) * math.sqrt(9))
    keys = list(net.state_dict())
    model, report = NormaliseFeatures()(net)
    assert torch.allclose(model(x), expected, atol=1e-12)
    tokens = torch.stack([x, 2 * x, x])  # (text, token, feature): each token by itself
    assert torch.allclose(model(tokens)[2], expected, atol=1e-12)
    assert report.changed == 1
    assert list(model.state_dict()) == keys
    assert torch.isfinite(model[2](torch.zeros(1, 9, dtype=f64))).all()
    assert NormaliseFeatures()(nn.Conv2d(1, 1, 1))[1].changed == 0


def without_norms(model: nn.Module, **options: float) -> tuple[nn.Module, tuple[str, ...]]:
    model, report = StandardiseWeights("scaled", **options)(DropNorms()(model)[0])
    return model, report.notes


def test_convolutions_behind_linear_outputs_may_have_their_own_gain() -> None:
    """Of MobileNetV2 those that widen, and the last one: each sees the end of a linear bottleneck."""
    model, notes = without_norms(mobilenet_v2(10, 3), linear_gain=1.0)
    gains = {name: module.gain for name, module in model.named_modules() if isinstance(module, WSConv2d)}
    widening = {f"features.{block}.conv.0.0" for block in range(2, 18)} | {"features.18.0"}
    assert {name for name, gain in gains.items() if gain == 1.0} == widening
    assert {gain for name, gain in gains.items() if name not in widening} == {RELU_GAIN}
    assert "17 of them see an output without an activation and have the gain 1.0" in notes


@pytest.mark.parametrize("build", [resnet20, resnet18, small_resnet])
def test_in_a_resnet_every_convolution_sees_activations_or_the_image(build: Callable[[int, int], nn.Module]) -> None:
    model, _ = without_norms(build(10, 3), linear_gain=1.0)
    assert {module.gain for module in model.modules() if isinstance(module, WSConv2d)} == {RELU_GAIN}


def test_activations_may_be_functions_and_a_layer_used_twice_counts_by_both_uses() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Conv2d(2, 2, 3, padding=1) for _ in range(3))
            self.twice = nn.Conv2d(2, 2, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.second(nn.functional.gelu(self.first(x)))
            x = self.twice(nn.functional.avg_pool2d(x + 1, 1)).relu()
            return self.third(self.twice(x))

    model, _ = without_norms(nn.Sequential(Net(), nn.BatchNorm2d(2)), linear_gain=0.5)
    assert [module.gain for module in model[0].children()] == [RELU_GAIN, RELU_GAIN, 0.5, RELU_GAIN]


def test_a_gain_of_one_behind_linear_outputs_keeps_activations_off_their_ceiling() -> None:
    """With the plain gain, widening convolutions make the variance 1.71^2 as large and ReLU6 cuts much of it off."""

    def cut_off(**options: float) -> float:
        torch.manual_seed(0)
        model, _ = without_norms(mobilenet_v2(10, 3), **options)
        shares: list[float] = []
        for module in model.modules():
            if isinstance(module, nn.ReLU6):
                module.register_forward_hook(lambda _, args, y: shares.append(float((y >= 6).double().mean())))
        with torch.no_grad():
            model.eval()(torch.randn(4, 3, 32, 32))
        return sum(shares) / len(shares)

    assert cut_off(linear_gain=1.0) < cut_off() / 2


def test_a_model_that_cannot_be_traced_is_named() -> None:
    class Choosy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(1, 1, 3), nn.BatchNorm2d(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.conv(x if x.sum() > 0 else -x))

    with pytest.raises(ConfigError) as refusal:
        without_norms(Choosy(), linear_gain=1.0)
    assert str(refusal.value) == (
        "linear_gain=1.0 needs to know which layers have an activation, but the model cannot be traced (TraceError); "
        "leave it out"
    )
