"""Stack operators: over clients they equal torch's own layers, and the Triton kernels equal the reference."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

from fednorm.core.optimizers import AdamUpdate
from fednorm.core.state import entries
from fednorm.engines.stack.kernels import adam_ops as adam_ops  # makes the operator known to torch
from fednorm.engines.stack.kernels import ops, weight_ops
from fednorm.engines.stack.kernels.layers import StackBatchNorm2d, StackConv2d, StackLinear, use_kernels
from fednorm.layers.fixup import ShiftedConv2d
from fednorm.layers.keyed import KeyedDropout, number_keyed_layers
from fednorm.layers.sample_norms import InstanceNorm
from fednorm.layers.ws_conv import Standard, WSConv2d
from fednorm.models import build

CLIENTS = 3


def gradients(
    model: nn.Module, dtype: torch.dtype = torch.float64
) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
    """Gradients, losses and moved buffers of a stack of clients with different weights."""
    draw = torch.Generator().manual_seed(0)

    def stacked(value: Tensor) -> Tensor:
        copies = value.detach().expand(CLIENTS, *value.shape).clone()
        return (
            copies + 0.1 * torch.randn(copies.shape, generator=draw).to(copies) if value.is_floating_point() else copies
        )

    params = {key: stacked(value) for key, value in model.named_parameters()}
    rest = {key: stacked(value).abs() for key, value in model.named_buffers()}
    x = torch.randn(CLIENTS, 4, 1, 12, 12, generator=draw, dtype=torch.float64).to(dtype)
    y = torch.randint(0, 10, (CLIENTS, 4), generator=draw)

    def loss(params: dict, rest: dict, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, {**params, **rest}, (x,)), y)

    grads, losses = torch.vmap(grad_and_value(loss))(params, rest, x, y)
    return grads, losses, rest


def assert_same_gradients(swapped: nn.Module, model: nn.Module, atol: float = 1e-10) -> Tensor:
    """Gradients, losses and moved buffers of a model with other layers are those of the model; returns the losses."""
    (grads, losses, rest), (expected, wanted, moved) = gradients(swapped), gradients(model)
    assert torch.allclose(losses, wanted, atol=1e-12)
    for key, value in expected.items():
        assert torch.allclose(grads[key], value, atol=atol), key
    for key, value in moved.items():
        assert torch.allclose(rest[key], value, atol=1e-12), key
    return losses


@pytest.mark.parametrize("name", ["small_resnet", "resnet20"])
def test_a_stack_of_clients_has_the_gradients_of_torchs_own_layers(name: str) -> None:
    model = build(name, in_channels=1, seed=0).double().train()
    swapped = copy.deepcopy(model)
    assert use_kernels(swapped) == sum(
        type(m) in (nn.Conv2d, nn.BatchNorm2d, nn.AdaptiveAvgPool2d) for m in model.modules()
    )
    assert [entry.key for entry in entries(swapped)] == [entry.key for entry in entries(model)]
    assert_same_gradients(swapped, model)


def test_poolings_and_dropouts_have_the_gradients_of_the_layers_they_replace() -> None:
    """Windows that leave a pixel over, equal maxima behind a ReLU, and the same numbers drawn for each client."""
    layers = [nn.Conv2d(1, 6, 2), nn.ReLU(), nn.MaxPool2d(2), KeyedDropout(0.25), nn.Conv2d(6, 6, 2), nn.ReLU()]
    layers += [nn.MaxPool2d((2, 2), stride=(2, 2)), nn.Flatten(), KeyedDropout(0.5), nn.Linear(24, 10)]
    model = nn.Sequential(*layers).double().train()
    number_keyed_layers(model)
    swapped = copy.deepcopy(model)
    assert use_kernels(swapped) == 6
    losses = assert_same_gradients(swapped, model)
    assert len(set(losses.tolist())) == CLIENTS


def test_norms_of_groups_and_of_vectors_have_the_gradients_of_torchs_own() -> None:
    layers = [nn.Conv2d(1, 6, 3), nn.GroupNorm(3, 6), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.GroupNorm(1, 6, affine=False)]
    layers += [
        nn.Flatten(2),
        nn.BatchNorm1d(6),
        nn.Flatten(),
        nn.Linear(6 * 64, 7),
        nn.BatchNorm1d(7),
        nn.Linear(7, 10),
    ]
    model = nn.Sequential(*layers).double().train()
    swapped = copy.deepcopy(model)
    assert use_kernels(swapped) == 6
    assert_same_gradients(swapped, model)


def test_a_norm_of_groups_of_vectors_is_torchs_own() -> None:
    for norm in (nn.GroupNorm(3, 6), nn.GroupNorm(3, 6, affine=False)):
        model = nn.Sequential(nn.Flatten(), nn.Linear(144, 6), norm, nn.Linear(6, 10)).double().train()
        swapped = copy.deepcopy(model)
        assert use_kernels(swapped) == 1
        assert_same_gradients(swapped, model, atol=1e-12)


def test_large_linear_layers_are_narrow_and_their_gradients_wide() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 64), nn.GELU(), nn.Linear(64, 10)).train()
    narrow = copy.deepcopy(model)
    use_kernels(narrow, torch.bfloat16)
    assert [isinstance(layer, StackLinear) for layer in narrow] == [False, True, False, False]
    (grads, losses, _), (expected, wanted, _) = gradients(narrow, torch.float32), gradients(model, torch.float32)
    assert losses.dtype == torch.float32
    assert torch.allclose(losses, wanted, rtol=2e-2)
    for key, value in expected.items():
        assert grads[key].dtype == torch.float32
        assert torch.allclose(grads[key], value, atol=2e-2 * float(value.abs().max())), key


def test_outside_a_mapping_the_layers_are_torchs() -> None:
    layers = [nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=True), nn.BatchNorm2d(4), nn.MaxPool2d(2), KeyedDropout()]
    plain = nn.Sequential(*layers).double().train()
    number_keyed_layers(plain)
    swapped = copy.deepcopy(plain)
    use_kernels(swapped)
    x = torch.randn(5, 3, 9, 9, dtype=torch.float64, requires_grad=True)
    z = x.detach().clone().requires_grad_()
    for model, given in ((plain, x), (swapped, z)):
        model(given).square().sum().backward()
    assert torch.allclose(x.grad, z.grad, atol=1e-10)
    assert torch.allclose(plain[1].running_var, swapped[1].running_var, atol=1e-12)
    assert torch.equal(plain[1].num_batches_tracked, swapped[1].num_batches_tracked)
    assert torch.allclose(plain.eval()(x), swapped.eval()(x), atol=1e-12)


def test_standardised_and_shifted_convolutions_have_the_gradients_of_the_layers_they_replace() -> None:
    """Both styles, a learned gain, a filter for each channel, and filters so small that their norm is bounded."""
    shifted = ShiftedConv2d(6, 6, 3)
    shifted.shift = nn.Parameter(torch.full((1,), 0.5))
    layers = [WSConv2d(1, 6, 3, style="qiao"), nn.ReLU(), WSConv2d(6, 6, 3, learnable_gain=True, bias=False), shifted]
    layers += [InstanceNorm(6, True, "norm"), WSConv2d(6, 6, 3, groups=6), WSConv2d(6, 6, 1), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(6 * 16, 10)).double().train()
    nn.init.constant_(model[6].weight, 0.5)
    swapped = copy.deepcopy(model)
    assert use_kernels(swapped) == 6
    assert_same_gradients(swapped, model)


def test_constant_filters_have_the_gradient_of_the_layer_they_are_in() -> None:
    """A norm of zero has none, and one below the bound changes nothing."""
    w = torch.zeros(2, 3, 2, 3, 3, dtype=torch.float64)
    w[1] = 1e-4 * torch.randn(3, 2, 3, 3, dtype=torch.float64)
    dy = torch.randn_like(w)
    for standard in (Standard(1.0, 17**0.5, 0.0, 1e-5), Standard(1.7, 1.0, 1e-2, 0.0)):
        leaf = w.clone().requires_grad_()
        y = torch.stack([standard(each) for each in leaf])
        (wanted,) = torch.autograd.grad(y, leaf, dy)
        assert torch.allclose(weight_ops.standardise(w, *standard), y.detach(), atol=1e-12)
        assert torch.allclose(weight_ops.standardise_grad(w, dy, *standard), wanted, rtol=1e-9)


def test_only_plain_layers_are_swapped() -> None:
    special = [nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 4, 3, dilation=2), nn.Conv2d(4, 4, 3, padding="same")]
    special += [nn.MaxPool2d(3, 2), nn.MaxPool2d(2, padding=1), nn.MaxPool2d(2, ceil_mode=True), KeyedDropout(0.5, 2)]
    model = nn.Sequential(*special, type("Own", (nn.Conv2d,), {})(4, 4, 3), nn.SyncBatchNorm(4))
    assert use_kernels(model) == 0
    assert not any(isinstance(module, StackConv2d | StackBatchNorm2d) for module in model.modules())


def test_narrow_convolutions_hand_other_layers_their_own_type() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.Flatten())
    model.append(nn.Linear(4 * 144, 10))
    use_kernels(model, torch.bfloat16)
    grads, losses, _ = gradients(model.train(), torch.float32)
    assert losses.dtype == torch.float32
    assert {grad.dtype for grad in grads.values()} == {torch.float32}
    assert all(bool(grad.isfinite().all()) for grad in grads.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_of_a_stack_is_that_of_each_client(decoupled: bool, dtype: torch.dtype) -> None:
    """To the bit, where the operator is its reference; each client has its own rate, decay and count of steps."""
    draw = torch.Generator().manual_seed(0)
    value, grad, first, second = torch.randn(4, CLIENTS, 37, generator=draw, dtype=dtype)
    count, lr, decay = torch.rand(3, CLIENTS, generator=draw, dtype=dtype)
    held = {"exp_avg": first, "exp_avg_sq": second.square(), "step": (10 * count).round()[:, None].repeat(1, 37)}
    update = AdamUpdate(0.8, 0.99, 1e-6, decoupled)
    options = (update.beta1, update.beta2, update.eps, decoupled)
    moved = torch.ops.fednorm.adam(value, list(grad.split([30, 7], 1)), *held.values(), lr, decay, *options)
    kernel = ops.kernels_fit(value)
    for row in range(CLIENTS):
        own = {name: each[row] for name, each in held.items()}
        wanted, kept = update(value[row], grad[row], own, {"lr": lr[row], "weight_decay": decay[row]})
        for got, exact in zip(moved, (wanted, *kept.values()), strict=True):
            same = torch.allclose(got[row], exact, rtol=1e-5) if kernel else torch.equal(got[row], exact)
            assert same
    again = [value, *(each.clone() for each in held.values())]
    torch.ops.fednorm.adam_in_place(again[0], [grad], *again[1:], lr, decay, *options, None)
    assert all(torch.equal(old, new) for old, new in zip(again, moved, strict=True))


@pytest.mark.skipif(
    find_spec("triton") is None or find_spec("ml_dtypes") is None,
    reason="Triton, or what its interpreter is taught narrow numbers with, is not installed",
)
def test_triton_kernels_equal_the_reference_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    checks = Path(__file__).with_name("kernel_checks.py")
    done = subprocess.run([sys.executable, str(checks)], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "equal", done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_kernels_on_a_gpu_equal_the_reference() -> None:
    model = build("small_resnet", in_channels=1, seed=0).cuda().train()
    swapped = copy.deepcopy(model)
    use_kernels(swapped)
    torch.backends.cudnn.allow_tf32 = False
    params = {key: value.detach().expand(CLIENTS, *value.shape).clone() for key, value in model.named_parameters()}
    x, y = torch.randn(CLIENTS, 4, 1, 12, 12, device="cuda"), torch.randint(0, 10, (CLIENTS, 4), device="cuda")
    found = []
    for net in (model, swapped):
        rest = {key: value.expand(CLIENTS, *value.shape).clone() for key, value in net.named_buffers()}

        def loss(params: dict, rest: dict, x: Tensor, y: Tensor, net: nn.Module = net) -> Tensor:
            return nn.functional.cross_entropy(functional_call(net, {**params, **rest}, (x,)), y)

        found.append(torch.vmap(grad_and_value(loss))(params, rest, x, y)[0])
    for key, value in found[0].items():
        assert torch.allclose(found[1][key], value, rtol=1e-3, atol=1e-5), key
