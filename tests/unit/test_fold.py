"""Folding for inference: the same outputs from fewer layers, and no fold that is not proven."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fednorm.core.surgery import Surgery
from fednorm.errors import ConfigError
from fednorm.layers.cohort import ToCohortBN
from fednorm.layers.norm_free import DropNorms
from fednorm.layers.shared_stats import ToHybridBN
from fednorm.layers.static_bn import ToStaticBN
from fednorm.layers.ws_conv import StandardiseWeights, WSConv2d
from fednorm.models.mobilenet import mobilenet_v2
from fednorm.models.resnet import small_resnet
from fednorm.pieces.fold import fold, fold_with_report
from fednorm.pieces.surgery import KeyDropout, ToGroupNorm


def warmed(model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """Statistics and affine away from their start values."""
    torch.manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                nn.init.normal_(module.weight, 1, 0.3)
                nn.init.normal_(module.bias, 0, 0.3)
        for _ in range(3):
            model.train()(torch.randn(shape, dtype=next(model.parameters()).dtype) * 2 + 1)
    return model.eval()


def norms(model: nn.Module) -> int:
    return sum(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


@pytest.mark.parametrize(
    "surgeries",
    [(), (StandardiseWeights("qiao"),), (ToCohortBN(),), (ToHybridBN(),), (KeyDropout(),)],
    ids=["plain", "ws", "cohort", "hybrid", "dropout"],
)
def test_all_norms_fold_and_outputs_stay(surgeries: tuple[Surgery, ...]) -> None:
    model = small_resnet(5, 3)
    for operate in surgeries:
        model, _ = operate(model)
    model = warmed(model, (4, 3, 16, 16))
    folded, report = fold_with_report(model)
    x = torch.randn(2, 3, 16, 16)
    assert norms(model) > 0
    assert norms(folded) == 0
    assert not any(isinstance(module, WSConv2d) for module in folded.modules())
    assert torch.allclose(folded(x), model(x), atol=1e-5)
    assert report.changed >= norms(model)


def test_a_deep_network_with_depthwise_layers_folds_exactly() -> None:
    model, _ = StandardiseWeights("qiao")(mobilenet_v2(5, 3))
    model = warmed(model.double(), (4, 3, 8, 8))
    folded = fold(model)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    assert norms(folded) == 0
    assert torch.allclose(folded(x), model(x), rtol=1e-9, atol=1e-9)


def test_norm_free_networks_become_plain_convolutions() -> None:
    model, _ = DropNorms()(small_resnet(5, 3))
    model, _ = StandardiseWeights("scaled", learnable_gain=True)(model)
    nn.init.uniform_(model.conv1.channel_gain, 0.5, 2)
    model.eval()
    folded, report = fold_with_report(model)
    x = torch.randn(2, 3, 16, 16)
    assert torch.allclose(folded(x), model(x), atol=1e-5)
    assert report.notes == ("9 standardised convolutions became plain",)
    assert isinstance(model.conv1, WSConv2d)


def test_linear_then_norm_folds_for_vectors_and_refuses_others() -> None:
    model = warmed(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU()), (8, 4))
    folded = fold(model)
    x = torch.randn(3, 4)
    assert norms(folded) == 0
    assert torch.allclose(folded(x), model(x), atol=1e-6)
    with pytest.raises(ConfigError, match="folded for vectors"):
        folded(torch.randn(3, 6, 4))


class TwoReaders(nn.Module):
    """The norm is not the only one to read the convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.bn(y) + y


class UsedTwice(nn.Module):
    """The convolution runs twice, once without the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x)) + self.conv(x + 1)


class WeightRead(nn.Module):
    """Something else reads the convolution's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x)) + nn.functional.conv2d(x, self.conv.weight)


class NormFirst(nn.Module):
    """A norm with nothing before it."""

    def __init__(self) -> None:
        super().__init__()
        self.bn, self.conv = nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.bn(x))


@pytest.mark.parametrize("build", [TwoReaders, UsedTwice, WeightRead, NormFirst])
def test_what_is_not_proven_stays(build: type[nn.Module]) -> None:
    model = warmed(build(), (4, 3, 5, 5))
    folded, report = fold_with_report(model)
    x = torch.randn(2, 3, 5, 5)
    assert norms(folded) == 1
    assert torch.equal(folded(x), model(x))
    assert report.notes == ("BatchNorm stays, no layer before it is provably its own: bn",)


class TwoNames(nn.Module):
    """The forward pass uses the second name of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 3, 1)
        self.second = self.first
        self.bn = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.second(x))


def test_a_module_with_two_names_is_folded_under_both() -> None:
    model = warmed(TwoNames(), (4, 3, 5, 5))
    folded = fold(model)
    x = torch.randn(2, 3, 5, 5)
    assert norms(folded) == 0
    assert torch.allclose(folded(x), model(x), atol=1e-6)


class Branching(nn.Module):
    """Control flow on values cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x)) if x.sum() > 0 else x


def test_untraceable_models_are_left_alone_and_say_so() -> None:
    _, report = fold_with_report(warmed(Branching(), (4, 3, 5, 5)))
    assert report.notes == ("1 BatchNorm layers stay: the model cannot be traced (TraceError)",)


def test_unqueried_statistics_are_not_folded_and_no_norm_is_no_work() -> None:
    model, _ = ToStaticBN()(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)))
    assert norms(fold(model)) == 1
    model.train()[1].query = True
    warmed(model, (4, 3, 5, 5))
    folded = fold(model)
    x = torch.randn(2, 3, 5, 5)
    assert norms(folded) == 0
    assert torch.allclose(folded(x), model(x), atol=1e-6)
    assert fold_with_report(ToGroupNorm()(small_resnet(4, 1))[0])[1].changed == 0
