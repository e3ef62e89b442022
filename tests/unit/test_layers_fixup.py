"""FixUp: counts, start values, learning-rate factors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from fednorm.errors import ConfigError
from fednorm.layers.fixup import FixupRates, ShiftedConv2d, ShiftedLinear, ToFixup
from fednorm.models.blocks import BasicBlock, ResidualBlock
from fednorm.models.resnet import resnet18, resnet20, small_resnet


def shaken(model: nn.Module) -> nn.Module:
    """Every parameter away from where it starts, so that a mistake about one shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand_like(parameter))
    return model


def branch_of(block: BasicBlock, x: Tensor) -> Tensor:
    conv = nn.functional.conv2d
    first = conv(x + block.conv1.shift, block.conv1.weight, stride=block.conv1.stride, padding=1)
    hidden = (first + block.bn1.shift).relu()
    return conv(hidden + block.conv2.shift, block.conv2.weight, padding=1) * block.bn2.scale + block.bn2.shift


def test_resnet20_has_the_published_parameters() -> None:
    model, report = ToFixup()(resnet20(10, 3))
    assert sum(p.numel() for p in model.parameters()) == 268_393
    assert sum(p.numel() == 1 for p in model.parameters()) == 47
    assert report.changed == 9
    assert not list(model.buffers())


@pytest.mark.parametrize("build", [resnet20, small_resnet, resnet18])
def test_logits_start_at_exactly_zero_and_branches_too(build: object) -> None:
    torch.manual_seed(0)
    model, _ = ToFixup()(build(10, 3))
    x = torch.randn(2, 3, 16, 16)
    logits = model(x)
    assert torch.equal(logits, torch.zeros(2, 10))
    loss = nn.functional.cross_entropy(logits.double(), torch.tensor([3, 7]))
    assert loss.item() == pytest.approx(math.log(10), abs=1e-12)
    features = model.relu(model.bn1(model.conv1(x)))
    block = next(module for module in model.modules() if isinstance(module, ResidualBlock))
    assert not block.main(model.maxpool(features)).any()


def test_branch_weights_have_the_published_spread_and_stay_a_rescaling() -> None:
    torch.manual_seed(0)
    before = resnet20(10, 3)
    raw = before.layer1[0].conv1.weight.detach().clone()
    model, _ = ToFixup()(before)
    weight = model.layer1[0].conv1.weight
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (16 * 9)) * 9**-0.5, rel=1e-5)
    ratio = weight / raw
    assert torch.allclose(ratio, ratio.mean(), rtol=1e-4)


def test_scalars_sit_where_the_paper_puts_them() -> None:
    torch.manual_seed(0)
    model, _ = ToFixup()(resnet20(10, 3).double())
    block = shaken(model).layer1[0]
    assert isinstance(block, BasicBlock)
    x = torch.randn(2, 16, 8, 8, dtype=torch.float64)
    assert torch.allclose(block(x), (branch_of(block, x) + x).relu(), atol=1e-12)
    assert isinstance(model.fc, ShiftedLinear)
    assert not isinstance(model.conv1, ShiftedConv2d)


def test_a_shortcut_without_parameters_sees_the_first_bias_and_appends_its_zeros() -> None:
    torch.manual_seed(0)
    block = shaken(ToFixup()(resnet20(10, 3).double())[0].layer2[0])
    x = torch.randn(2, 16, 8, 8, dtype=torch.float64)
    skipped = torch.cat([(x + block.conv1.shift)[:, :, ::2, ::2], torch.zeros(2, 16, 4, 4, dtype=torch.float64)], 1)
    assert torch.allclose(block(x), (branch_of(block, x) + skipped).relu(), atol=1e-12)


def test_a_projection_sees_the_first_bias_too_and_loses_its_norm() -> None:
    torch.manual_seed(0)
    block = shaken(ToFixup()(small_resnet(4, 1).double())[0].layer2[0])
    x = torch.randn(2, 8, 8, 8, dtype=torch.float64)
    skipped = nn.functional.conv2d(x + block.conv1.shift, block.downsample[0].weight, stride=2)
    assert torch.allclose(block(x), (branch_of(block, x) + skipped).relu(), atol=1e-12)
    assert isinstance(block.downsample[1], nn.Identity)
    assert not isinstance(block.downsample[0], ShiftedConv2d)


def test_the_stem_has_the_spread_of_torch_s_default_and_projections_that_of_their_outputs() -> None:
    torch.manual_seed(0)
    stem = ToFixup()(resnet20(10, 3))[0].conv1.weight
    assert stem.std().item() == pytest.approx(1 / math.sqrt(3 * 27), rel=1e-5)  # 0.111
    default = nn.Conv2d(3, 64 * 64, 3).weight
    assert default.std().item() == pytest.approx(1 / math.sqrt(3 * 27), rel=0.01)
    projection = ToFixup()(resnet18(10, 3))[0].layer2[0].downsample[0].weight
    assert projection.std().item() == pytest.approx(math.sqrt(2 / 128), rel=1e-5)


def test_blocks_keep_their_names_and_mode() -> None:
    before = resnet20(10, 3).eval()
    names = [name for name, _ in before.named_modules()]
    after, _ = ToFixup()(before)
    assert [name for name, _ in after.named_modules()] == names
    assert not any(module.training for module in after.modules())


def test_learning_rate_factors_cover_scalars_and_biases_alone() -> None:
    model, _ = ToFixup()(resnet20(10, 3))
    factors = FixupRates()(model)
    parameters = dict(model.named_parameters())
    assert len(factors) == 48
    assert set(factors.values()) == {0.1}
    assert {key for key, p in parameters.items() if p.numel() == 1 or key == "fc.bias"} == set(factors)
    assert FixupRates()(resnet20(10, 3)) == {}


def test_networks_without_residual_blocks_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 10))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    same, report = ToFixup()(model)
    assert report.changed == 0
    assert all(torch.equal(value, state[key]) for key, value in same.state_dict().items())


def test_constant_weights_are_refused() -> None:
    model = small_resnet(4, 1)
    nn.init.zeros_(model.layer1[0].conv1.weight)
    with pytest.raises(ConfigError, match="FixUp rescales weights that were drawn at random"):
        ToFixup()(model)
