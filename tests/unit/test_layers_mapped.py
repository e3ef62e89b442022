"""Every layer runs stacked: vmap(grad) over clients equals a loop over clients, state updates included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fednorm.core import rng
from fednorm.core.state import Kind, entries
from fednorm.core.surgery import Surgery
from fednorm.layers.adaptive_gn import ToAdaptiveGroupNorm
from fednorm.layers.brn import ToBatchRenorm
from fednorm.layers.cohort import ToCohortBN
from fednorm.layers.fixup import ToFixup
from fednorm.layers.keyed import key_names
from fednorm.layers.norm_free import DropNorms, NormaliseFeatures, ScaleResiduals
from fednorm.layers.scheduled import set_total_steps
from fednorm.layers.shared_stats import ToFederatedBN, ToHybridBN
from fednorm.layers.static_bn import ToStaticBN
from fednorm.layers.ws_conv import StandardiseWeights
from fednorm.models.resnet import small_resnet
from fednorm.pieces.surgery import (
    KeyDropout,
    ToGroupNorm,
    ToInstanceNorm,
    ToLayerNorm,
    ToPixelLayerNorm,
)

SURGERIES: dict[str, tuple[Surgery, ...]] = {
    "gn": (ToGroupNorm(),),
    "ln": (ToLayerNorm(),),
    "ln_pixel": (ToPixelLayerNorm(),),
    "in": (ToInstanceNorm(),),
    "gn+ws": (ToGroupNorm(), StandardiseWeights("qiao")),
    "fedwon": (DropNorms(), StandardiseWeights("scaled", learnable_gain=True)),
    "fedwon-nf": (DropNorms(), StandardiseWeights("scaled"), ScaleResiduals("nf")),
    "brn": (ToBatchRenorm(total_steps=4, momentum=0.2),),
    "fixup": (ToFixup(),),
    "sbn": (ToStaticBN(),),
    "fedtan-local": (ToCohortBN(),),
    "fbn": (ToFederatedBN(),),
    "hbn": (ToHybridBN(),),
    "fednn": (ToAdaptiveGroupNorm(), StandardiseWeights("qiao")),
    "fn": (NormaliseFeatures(),),
    "dropout": (KeyDropout(),),
}
BATCH_FREE = ("gn", "ln", "ln_pixel", "in", "gn+ws", "fedwon", "fedwon-nf", "fixup")
CLIENTS = 3


def build(name: str) -> nn.Module:
    torch.manual_seed(3)
    model = small_resnet(num_classes=4, in_channels=1)
    model.fc = nn.Sequential(nn.Dropout(0.5), model.fc) if name == "dropout" else model.fc
    model = model.double()
    for operate in SURGERIES[name]:
        model, report = operate(model)
        assert report.changed > 0
    set_total_steps(model, 4)
    with torch.no_grad():  # FixUp starts with zero branches, where too many gradients vanish to test anything
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def train_twice(model: nn.Module) -> Callable[[dict, dict, Tensor, Tensor, Tensor], tuple[dict, Tensor]]:
    keyed = key_names(model)

    def loss(params: dict, rest: dict, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
        output = functional_call(model, params | rest | dict.fromkeys(keyed, key), (x,))
        return nn.functional.cross_entropy(output, y)

    def run(params: dict, rest: dict, x: Tensor, y: Tensor, key: Tensor) -> tuple[dict, Tensor]:
        value = torch.zeros(())
        for _ in range(2):  # the second step starts from statistics the first one left
            grads, value = grad_and_value(loss)(params, rest, x, y, key)
            params = {name: params[name] - 0.1 * grads[name] for name in params}
        return params, value

    return run


@pytest.mark.parametrize("name", SURGERIES)
def test_stacked_clients_equal_a_loop(name: str) -> None:
    model = build(name)
    params = {key: p.detach() for key, p in model.named_parameters()}
    rest = {key: b for key, b in model.named_buffers() if key in model.state_dict()}
    x = torch.randn(CLIENTS, 6, 1, 12, 12, dtype=torch.float64)
    y = torch.randint(4, (CLIENTS, 6))
    keys = rng.key(torch.arange(CLIENTS), "client")
    run = train_twice(model)

    def copies(tree: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: value.expand(CLIENTS, *value.shape).clone() for key, value in tree.items()}

    stacked_rest = copies(rest)
    stacked, losses = vmap(run)(copies(params), stacked_rest, x, y, keys)
    for client in range(CLIENTS):
        own = {key: value.clone() for key, value in rest.items()}
        alone, loss = run(params, own, x[client], y[client], keys[client])
        assert torch.allclose(losses[client], loss, rtol=0, atol=1e-11)
        for key, value in alone.items():
            assert torch.allclose(stacked[key][client], value, rtol=0, atol=1e-11), key
        for key, value in own.items():
            assert torch.allclose(stacked_rest[key][client], value, rtol=0, atol=1e-11), key
    assert not torch.equal(stacked["conv1.weight"][0], stacked["conv1.weight"][1])


@pytest.mark.parametrize("name", SURGERIES)
def test_surgery_draws_no_random_numbers(name: str) -> None:
    model = small_resnet(num_classes=4, in_channels=1)
    model.drop = nn.Dropout()
    before = torch.get_rng_state()
    for operate in SURGERIES[name]:
        model, _ = operate(model)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", BATCH_FREE)
def test_mean_gradient_of_clients_is_the_gradient_of_their_union(name: str) -> None:
    model = build(name)
    x, y = torch.randn(3, 5, 1, 12, 12, dtype=torch.float64), torch.randint(4, (3, 5))

    def gradient(x: Tensor, y: Tensor) -> list[Tensor]:
        loss = nn.functional.cross_entropy(model(x), y)
        return list(torch.autograd.grad(loss, list(model.parameters())))

    union = gradient(x.flatten(0, 1), y.flatten())
    parts = [gradient(x[client], y[client]) for client in range(3)]
    for whole, *pieces in zip(union, *parts, strict=True):
        assert torch.allclose(whole, sum(pieces) / 3, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [*BATCH_FREE, "fn", "fednn", "brn"])
def test_who_sees_the_batch(name: str) -> None:
    model = build(name)
    x = torch.randn(6, 1, 12, 12, dtype=torch.float64)
    alone, together = model(x[:2]), model(x)[:2]
    assert torch.allclose(alone, together, rtol=0, atol=1e-12) == (name in BATCH_FREE)


EXPECTED_KINDS = {
    "brn": {"weight": "affine", "bias": "affine", "running_mean": "statistic", "running_std": "statistic"},
    "hbn": {"factor": "extra", "batch_mean": "statistic", "running_var": "statistic", "weight": "affine"},
    "fbn": {
        "batch_var": "statistic",
        "batch_count": "statistic",
        "running_mean": "statistic",
        "num_batches_tracked": "counter",
    },
    "fednn": {"logits": "weight", "choice": "extra", "latched": "counter", "running_var": "statistic"},
    "sbn": {"running_mean": "statistic", "num_batches_tracked": "counter", "bias": "affine"},
    "fedtan-local": {"running_mean": "statistic", "weight": "affine"},
}


@pytest.mark.parametrize("name", EXPECTED_KINDS)
def test_kinds_are_declared_by_type(name: str) -> None:
    found = {entry.part: entry for entry in entries(build(name)) if entry.layer == "bn1"}
    for part, kind in EXPECTED_KINDS[name].items():
        assert found[part].kind is Kind(kind)
        assert found[part].batch_norm
