"""Depthwise convolutions of a stack: torch's own numbers, and no operator of torch's own left in a MobileNet's step."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

import tiny
from fednorm.engines.stack.fusion import fuse
from fednorm.engines.stack.kernels.layers import StackConv2d, use_kernels
from fednorm.engines.stack.slot import StackSlot
from fednorm.engines.stack.tracing import trace
from fednorm.engines.stack.ways import Way
from fednorm.halves.prepared import prepare
from fednorm.methods import parse
from fednorm.models import build
from test_kernels import assert_same_gradients
from test_stacked import gap

CHANNELS = 6


def between(middle: nn.Module) -> nn.Module:
    """A network with this layer behind a plain one, and a norm with a ReLU6 behind both."""
    behind = [nn.BatchNorm2d(CHANNELS), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, 10)]
    return nn.Sequential(nn.Conv2d(1, CHANNELS, 3), middle, *behind).double().train()


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": 3, "padding": 1, "stride": 2, "bias": False},
        {"kernel_size": 5, "padding": 4, "dilation": 2},
        {"kernel_size": (3, 7), "padding": (0, 3), "stride": 2},
    ],
)
def test_a_stack_has_the_gradients_of_torchs_own(options: dict) -> None:
    model = between(nn.Conv2d(CHANNELS, CHANNELS, groups=CHANNELS, **options))
    swapped = copy.deepcopy(model)
    use_kernels(swapped)
    assert isinstance(swapped[1], StackConv2d)
    assert_same_gradients(swapped, model)


def test_outside_a_mapping_the_layer_is_torchs() -> None:
    model = between(nn.Conv2d(CHANNELS, CHANNELS, 3, 2, 1, groups=CHANNELS))
    swapped = copy.deepcopy(model)
    use_kernels(swapped)
    x = torch.randn(4, 1, 9, 9, dtype=torch.float64)
    for net in (model, swapped):
        net(x).square().sum().backward()
    for wanted, got in zip(model.parameters(), swapped.parameters(), strict=True):
        assert torch.allclose(got.grad, wanted.grad, atol=1e-12)


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(CHANNELS, 2 * CHANNELS, 3, groups=CHANNELS),
        nn.Conv2d(CHANNELS, CHANNELS, 3, groups=2),
        nn.Conv2d(CHANNELS, CHANNELS, 3, groups=CHANNELS, dilation=(1, 2)),
        nn.Conv2d(CHANNELS, CHANNELS, 3, groups=CHANNELS, stride=(1, 2)),
        nn.Conv2d(CHANNELS, CHANNELS, 3, groups=CHANNELS, padding="same"),
        nn.Conv2d(CHANNELS, CHANNELS, 3, groups=CHANNELS, padding=1, padding_mode="circular"),
    ],
)
def test_other_convolutions_with_groups_stay(conv: nn.Module) -> None:
    assert use_kernels(nn.Sequential(conv)) == 0


def step_of_mobilenet(clients: int = 2) -> torch.fx.GraphModule:
    """A stack's gradients by MobileNetV2 in bfloat16, traced without running it, and fused."""
    model = prepare(build("mobilenet_v2", in_channels=3, seed=0), parse("fedavg")).model.train()
    use_kernels(model, torch.bfloat16)

    def stacked(entries: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: value.detach().expand(clients, *value.shape).clone() for key, value in entries.items()}

    def loss(params: dict[str, Tensor], rest: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, {**params, **rest}, (x,)), y)

    def step(params: dict[str, Tensor], rest: dict[str, Tensor], x: Tensor, y: Tensor) -> object:
        return torch.vmap(grad_and_value(loss))(params, rest, x, y), rest

    x, y = torch.zeros(clients, 2, 3, 32, 32), torch.zeros(clients, 2, dtype=torch.int64)
    return fuse(trace(step, stacked(dict(model.named_parameters())), stacked(dict(model.named_buffers())), x, y))


def test_no_layer_of_a_mobilenet_is_torchs_own() -> None:
    """17 depthwise layers, 35 others, 52 norms: each an operator of ours, with all that follows it taken in."""
    nodes = [node for node in step_of_mobilenet().graph.nodes if node.op == "call_function"]
    found = Counter(str(node.target) for node in nodes)
    ours = {name.split(".")[1]: count for name, count in found.items() if name.startswith("fednorm.")}
    assert ours == {
        "dropout": 2,
        "linear": 1,
        "linear_input_grad": 1,
        "linear_weight_grad": 1,
        "conv_moments": 35,
        "conv_input_grad": 34,
        "conv_weight_grad": 35,
        "depthwise_moments": 17,
        "depthwise_input_grad": 17,
        "depthwise_weight_grad": 17,
        "norm": 52,
        "norm_grad": 52,
    }
    # Images are touched by nothing else but the cast in front of the first layer, and around the mean behind the last.
    images = [node for node in nodes if isinstance(node.meta.get("val"), Tensor) and node.meta["val"].dim() == 5]
    torchs = Counter(str(node.target) for node in images if str(node.target).startswith("aten."))
    assert not torchs.keys() & {"aten.add.Tensor", "aten.hardtanh.default", "aten.hardtanh_backward.default"}
    assert not any("convolution" in name for name in found)
    residuals = [node for node in nodes if str(node.target) == "fednorm.norm.default" and "addend" in node.kwargs]
    assert len(residuals) == 10
    assert all("parts" in node.kwargs for node in nodes if str(node.target) == "fednorm.norm.default")


@pytest.mark.slow
def test_a_mobilenet_in_programs_equals_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fednorm.engines.stack.slot.DEVICES", {"cpu"})
    model = build("mobilenet_v2", num_classes=tiny.NUM_CLASSES, in_channels=1, seed=0).double()
    changes = {"data": tiny.federation((8, 8)), "rounds": 1, "train__local_steps": 1, "train__lr": 0.02}
    reference = tiny.play(tiny.plan(model=copy.deepcopy(model), engine__name="sequential", **changes))
    plan = tiny.plan(model=model, engine__name="stacked", **changes)
    use_kernels(plan.prepared.model)
    run = tiny.play(plan)
    assert isinstance(run.server.held, StackSlot)
    assert all(run.server.held.stack.ways.of(phase) is Way.FUSED for phase in plan.phases)
    assert gap(reference, run) < 1e-10
