"""Kinds by module type, on the models that defeat rules about names."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fednorm.core.state import (
    Kind,
    digest,
    entries,
    is_batch_norm,
    is_norm,
    kinds,
    kinds_by_name,
    model_state,
    register_norm,
    tree_bytes,
)
from fednorm.errors import ConfigError

BATCH_NORM = {"weight": "affine", "bias": "affine", "running_mean": "statistic", "running_var": "statistic"} | {
    "num_batches_tracked": "counter"
}


def counts(model: nn.Module) -> dict[str, int]:
    return dict(Counter(kind.value for kind in kinds(model).values()))


class TorchvisionBlock(nn.Module):
    """A residual block as torchvision names it: the shortcut's BatchNorm is `downsample.1`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 4, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.downsample = nn.Sequential(nn.Conv2d(2, 4, 1, bias=False), nn.BatchNorm2d(4))


def mobilenet_block() -> nn.Module:
    """Inverted residual as MobileNet numbers it: no layer's name tells what it is."""
    conv = nn.Sequential(nn.Conv2d(2, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU6())
    return nn.Sequential(nn.Sequential(conv, nn.Conv2d(4, 2, 1, bias=False), nn.BatchNorm2d(2)))


def test_the_batch_norm_of_a_torchvision_shortcut_is_found() -> None:
    found = kinds(TorchvisionBlock())
    for layer in ("bn1", "downsample.1"):
        assert {part: found[f"{layer}.{part}"] for part in BATCH_NORM} == BATCH_NORM
    assert found["downsample.0.weight"] is Kind.WEIGHT
    assert len(found) == 2 + 2 * 5


def test_the_numbered_batch_norms_of_mobilenet_are_found() -> None:
    assert counts(mobilenet_block()) == {"weight": 2, "affine": 4, "statistic": 4, "counter": 2}


def test_names_that_look_like_batch_norm_mean_nothing() -> None:
    model = nn.ModuleDict({"subnet": nn.Linear(2, 2), "bn": nn.Linear(2, 2), "batchnorm": nn.Conv2d(1, 1, 1)})
    assert counts(model) == {"weight": 6}


def test_a_subclass_is_what_it_derives_from() -> None:
    class Fancy(nn.BatchNorm2d):
        def __init__(self, channels: int) -> None:
            super().__init__(channels)
            self.gate = nn.Parameter(torch.ones(channels))
            self.register_buffer("ema", torch.zeros(1))

    found = kinds(Fancy(3))
    assert {part: found[part] for part in BATCH_NORM} == BATCH_NORM
    assert (found["gate"], found["ema"]) == (Kind.WEIGHT, Kind.EXTRA)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_every_batch_norm_of_torch_has_five_entries(norm: type[nn.Module]) -> None:
    listed = entries(norm(3))
    assert {entry.part: entry.kind.value for entry in listed} == BATCH_NORM
    assert all(entry.batch_norm for entry in listed)
    assert is_batch_norm(norm(3))


@pytest.mark.parametrize(
    "norm", [nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.RMSNorm(4), nn.InstanceNorm2d(4, affine=True)]
)
def test_other_norms_have_an_affine_but_are_not_batch_norms(norm: nn.Module) -> None:
    listed = entries(norm)
    assert listed
    assert {entry.kind for entry in listed} == {Kind.AFFINE}
    assert not any(entry.batch_norm for entry in listed)
    assert is_norm(norm)
    assert not is_batch_norm(norm)


def test_instance_norm_with_statistics_reports_them() -> None:
    norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    assert counts(norm) == {"affine": 2, "statistic": 2, "counter": 1}


def test_batch_norm_without_affine_or_statistics_lists_what_it_has() -> None:
    assert counts(nn.BatchNorm2d(3, affine=False)) == {"statistic": 2, "counter": 1}
    assert counts(nn.BatchNorm2d(3, track_running_stats=False)) == {"affine": 2}
    assert is_batch_norm(nn.BatchNorm2d(3, affine=False, track_running_stats=False))


def test_a_frozen_batch_norm_of_another_library_is_known_by_its_class() -> None:
    class FrozenBatchNorm2d(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            for part in ("weight", "bias", "running_mean", "running_var"):
                self.register_buffer(part, torch.ones(channels))

    listed = {entry.part: entry for entry in entries(FrozenBatchNorm2d(3))}
    assert {part: entry.kind.value for part, entry in listed.items()} == {
        part: kind for part, kind in BATCH_NORM.items() if kind != "counter"
    }
    assert not any(entry.trainable for entry in listed.values())
    assert is_batch_norm(FrozenBatchNorm2d(3))


def test_a_module_in_two_places_is_listed_once() -> None:
    norm = nn.BatchNorm1d(3)
    model = nn.Sequential(nn.Linear(3, 3), norm, nn.Linear(3, 3), norm)
    assert [entry.key for entry in entries(model) if entry.layer == "1"] == [f"1.{part}" for part in BATCH_NORM]
    assert not [entry for entry in entries(model) if entry.layer == "3"]


def test_a_tied_parameter_is_listed_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    assert [entry.key for entry in entries(model)] == ["0.weight"]


def test_nesting_of_any_depth_is_walked() -> None:
    model: nn.Module = nn.BatchNorm1d(2)
    for _ in range(6):
        model = nn.ModuleList([nn.ModuleDict({"inner": model})])
    assert counts(model) == {"affine": 2, "statistic": 2, "counter": 1}


def test_a_lazy_module_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError) as refusal:
        entries(nn.Sequential(nn.LazyLinear(3)))
    assert (
        str(refusal.value) == "'0.weight' has no shape yet (a lazy module); run one forward pass before using fednorm"
    )


def test_a_materialised_lazy_batch_norm_is_an_ordinary_one() -> None:
    model = nn.Sequential(nn.LazyBatchNorm1d())
    model(torch.randn(4, 3))
    assert counts(model) == {"affine": 2, "statistic": 2, "counter": 1}


def test_buffers_that_are_not_saved_are_no_state() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("scratch", torch.zeros(3), persistent=False)
    model.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    model.register_buffer("scale", torch.ones(1))
    found = kinds(model)
    assert "scratch" not in found
    assert (found["seen"], found["scale"]) == (Kind.COUNTER, Kind.EXTRA)


def test_a_parameter_without_gradient_is_not_trainable() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    assert {entry.part: entry.trainable for entry in entries(model)} == {"weight": True, "bias": False}


def test_entries_follow_the_state_dict() -> None:
    model = nn.Sequential(TorchvisionBlock(), mobilenet_block())
    assert [entry.key for entry in entries(model)] == list(model.state_dict())
    assert all(entry.shape == tuple(model.state_dict()[entry.key].shape) for entry in entries(model))


def test_a_users_norm_can_be_declared() -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))
            self.register_buffer("ema", torch.zeros(2))

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

    assert counts(Running()) == {"weight": 1, "extra": 1}
    register_norm(Running, scale="affine", ema="statistic")
    register_norm(Plain, scale="affine")
    assert counts(Running()) == {"affine": 1, "statistic": 1}
    assert is_batch_norm(Running())
    assert not is_batch_norm(Plain())
    assert is_norm(Plain())


def test_bare_state_dicts_are_read_by_their_running_means() -> None:
    model = nn.Sequential(TorchvisionBlock(), mobilenet_block())
    assert kinds_by_name(model.state_dict()) == kinds(model)


def test_the_state_is_a_copy() -> None:
    model = nn.BatchNorm1d(3)
    state = model_state(model)
    model(torch.randn(4, 3))
    assert int(state["num_batches_tracked"]) == 0
    assert not state["weight"].requires_grad


def test_bytes_are_those_of_the_contents() -> None:
    model = nn.BatchNorm1d(3)
    assert tree_bytes(model_state(model)) == 4 * 3 * 4 + 8 == sum(entry.bytes for entry in entries(model))


DTYPES = st.sampled_from([torch.float32, torch.float64, torch.int64])


@given(st.integers(0, 5), st.integers(0, 63), DTYPES)
def test_a_digest_notices_every_bit(place: int, bit: int, dtype: torch.dtype) -> None:
    tree = {"a": torch.arange(6).to(dtype), "b": torch.ones(2)}
    flipped = {key: value.clone() for key, value in tree.items()}
    raw = flipped["a"].view(torch.uint8)
    raw[(place * dtype.itemsize * 8 + bit % (dtype.itemsize * 8)) // 8] ^= 1 << bit % 8
    assert digest(tree) == digest(dict(reversed(tree.items())))
    assert digest(flipped) != digest(tree)


def reshaped(tensor: Tensor) -> list[Tensor]:
    return [tensor.view(2, 3), tensor.view(3, 2), tensor.view(6), tensor.to(torch.float32)]


def test_a_digest_notices_names_shapes_and_types() -> None:
    tensor = torch.zeros(6, dtype=torch.float64)
    marks = {digest({"a": other}) for other in reshaped(tensor)} | {digest({"b": tensor}), digest({})}
    assert len(marks) == 6
    assert digest({"a": torch.zeros(3, 2).t()}) == digest({"a": torch.zeros(2, 3)})
