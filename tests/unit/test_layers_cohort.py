"""The cohort mean and FedTAN's BatchNorm: lock-step clients compute what one batch of all their data would."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fednorm.layers.cohort import CohortBN, ToCohortBN, cohort_mean, set_lockstep, share_names
from fednorm.models.resnet import small_resnet

f64 = torch.float64
CLIENTS, BATCH = 4, 5


def test_forward_is_the_weighted_mean_and_outside_vmap_the_identity() -> None:
    x, w = torch.randn(CLIENTS, 3, dtype=f64), torch.tensor([1.0, 0.0, 2.0, 5.0], dtype=f64)
    assert torch.allclose(vmap(cohort_mean)(x), x.mean(0).expand(CLIENTS, 3), atol=1e-15)
    expected = (w[:, None] * x).sum(0) / w.sum()
    assert torch.allclose(vmap(cohort_mean)(x, w), expected.expand(CLIENTS, 3), atol=1e-15)
    assert torch.allclose(vmap(cohort_mean, in_dims=1)(x.T.contiguous()), x.mean(0).expand(CLIENTS, 3), atol=1e-15)
    assert torch.equal(cohort_mean(x), x)
    assert torch.equal(vmap(lambda unused: cohort_mean(x[0]))(x), x[:1].expand(CLIENTS, 3))


@pytest.mark.parametrize("weighted", [False, True])
def test_weighted_mean_of_client_gradients_is_the_gradient_of_the_mean_loss(weighted: bool) -> None:
    torch.manual_seed(0)
    theta = torch.randn(3, dtype=f64, requires_grad=True)
    data = torch.randn(CLIENTS, 3, dtype=f64)
    shares = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=f64) if weighted else torch.ones(CLIENTS, dtype=f64)
    shares = shares / shares.sum()

    def client_loss(theta: Tensor, x: Tensor, share: Tensor) -> Tensor:
        mean = cohort_mean((theta * x).sin(), share)
        return (mean * x).exp().sum()

    stacked = vmap(grad(client_loss), in_dims=(None, 0, 0))(theta.detach(), data, shares)
    means = (shares[:, None] * (theta * data).sin()).sum(0)
    losses = (means * data).exp().sum(1)
    (expected,) = torch.autograd.grad((shares * losses).sum(), theta)
    assert torch.allclose((shares[:, None] * stacked).sum(0), expected, rtol=0, atol=1e-12)


def test_second_derivatives_pass_through() -> None:
    x = torch.randn(CLIENTS, dtype=f64)
    second = vmap(grad(grad(lambda x: cohort_mean(x**3).sum())))(x)
    assert torch.allclose(second, 6 * x, atol=1e-12)


def lockstep_net() -> nn.Module:
    torch.manual_seed(2)
    net = small_resnet(num_classes=4, in_channels=1)
    head = nn.Sequential(nn.Linear(32, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
    net.fc = head
    return net.double()


def test_lockstep_equals_batch_norm_on_the_union() -> None:
    """I20: the averaged gradient and the running statistics are those of centralized BN on the concatenated batch."""
    reference = lockstep_net().train()
    model, report = ToCohortBN()(copy.deepcopy(reference))
    assert report.notes == ("10 BatchNorm layers became CohortBN: affine kept, running statistics kept",)
    set_lockstep(model, True)
    x = torch.randn(CLIENTS, BATCH, 1, 16, 16, dtype=f64) * torch.arange(1, CLIENTS + 1).reshape(-1, 1, 1, 1, 1)
    y = torch.randint(4, (CLIENTS, BATCH))
    params = {key: value.detach() for key, value in model.named_parameters()}
    rest = {key: b.expand(CLIENTS, *b.shape).clone() for key, b in model.named_buffers() if key in model.state_dict()}

    def loss(params: dict, rest: dict, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, params | rest, (x,)), y)

    stacked = vmap(grad(loss), in_dims=(None, 0, 0, 0))(params, rest, x, y)
    nn.functional.cross_entropy(reference(x.flatten(0, 1)), y.flatten()).backward()
    for key, parameter in reference.named_parameters():
        assert torch.allclose(stacked[key].mean(0), parameter.grad, rtol=0, atol=1e-12), key
    for key, buffer in reference.named_buffers():
        for client in range(CLIENTS):
            assert torch.allclose(rest[key][client].to(f64), buffer.to(f64), rtol=0, atol=1e-12), key

    set_lockstep(model, False)
    local = vmap(grad(loss), in_dims=(None, 0, 0, 0))(params, rest, x, y)
    assert any((local[key].mean(0) - p.grad).abs().max() > 1e-3 for key, p in reference.named_parameters())


def test_a_client_without_share_does_not_count() -> None:
    layer = CohortBN(3).double()
    layer.lockstep = True
    x = torch.randn(3, 4, 3, 2, 2, dtype=f64)
    stats = {key: b.expand(3, *b.shape).clone() for key, b in layer.named_buffers() if key != "share"}
    names = share_names(layer)
    assert names == ["share"]

    def run(stats: dict, x: Tensor, share: Tensor) -> Tensor:
        return functional_call(layer, stats | dict.fromkeys(names, share), (x,))

    y = vmap(run)(stats, x, torch.tensor([1.0, 1.0, 0.0], dtype=f64))
    reference = nn.BatchNorm2d(3).double()
    expected = reference(x[:2].flatten(0, 1)).reshape(2, 4, 3, 2, 2)
    assert torch.allclose(y[:2], expected, atol=1e-12)
    assert torch.allclose(stats["running_var"][0], reference.running_var, atol=1e-12)


def test_alone_the_layer_is_batch_norm() -> None:
    x = torch.randn(6, 3, 4, 4, dtype=f64)
    layer, reference = CohortBN(3).double(), nn.BatchNorm2d(3).double()
    for lockstep in (True, False):
        layer.lockstep = lockstep
        assert torch.allclose(layer(x), reference(x), atol=1e-12)
    assert torch.allclose(layer.running_var, reference.running_var, atol=1e-12)
    assert torch.allclose(layer.eval()(x), reference.eval()(x), atol=1e-12)
