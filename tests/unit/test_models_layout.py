"""resnet18 and mobilenet_v2 have the keys of torchvision's models, so that pretrained files load.

The keys are derived here from torchvision's rules, not from torchvision: it is no dependency.
"""

import pytest

from fednorm.models import build


def _norm(prefix):
    return [f"{prefix}.{part}" for part in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")]


def _conv_norm(conv, norm):
    return [f"{conv}.weight", *_norm(norm)]


def resnet18_keys():
    keys = _conv_norm("conv1", "bn1")
    for stage in (1, 2, 3, 4):
        for block in (0, 1):
            prefix = f"layer{stage}.{block}"
            keys += _conv_norm(f"{prefix}.conv1", f"{prefix}.bn1") + _conv_norm(f"{prefix}.conv2", f"{prefix}.bn2")
            if stage > 1 and block == 0:
                keys += _conv_norm(f"{prefix}.downsample.0", f"{prefix}.downsample.1")
    return [*keys, "fc.weight", "fc.bias"]


def mobilenet_v2_keys():
    keys = _conv_norm("features.0.0", "features.0.1")
    for block in range(1, 18):
        prefix = f"features.{block}.conv"
        filters = ["0"] if block == 1 else ["0", "1"]  # the first block does not widen
        for index in filters:
            keys += _conv_norm(f"{prefix}.{index}.0", f"{prefix}.{index}.1")
        narrow = len(filters)
        keys += _conv_norm(f"{prefix}.{narrow}", f"{prefix}.{narrow + 1}")
    keys += _conv_norm("features.18.0", "features.18.1")
    return [*keys, "classifier.1.weight", "classifier.1.bias"]


@pytest.mark.parametrize("stem", ["cifar", "imagenet"])
@pytest.mark.parametrize(
    ("name", "keys", "count"), [("resnet18", resnet18_keys(), 122), ("mobilenet_v2", mobilenet_v2_keys(), 314)]
)
def test_keys_and_their_order(name, keys, count, stem):
    assert list(build(name, stem=stem).state_dict()) == keys
    assert len(keys) == count


def test_shapes_at_the_places_that_differ():
    shapes = {key: tuple(tensor.shape) for key, tensor in build("resnet18", stem="imagenet").state_dict().items()}
    assert shapes["conv1.weight"] == (64, 3, 7, 7)
    assert shapes["layer2.0.downsample.0.weight"] == (128, 64, 1, 1)
    assert tuple(build("resnet18", in_channels=1).conv1.weight.shape) == (64, 1, 3, 3)
    shapes = {key: tuple(tensor.shape) for key, tensor in build("mobilenet_v2").state_dict().items()}
    assert shapes["features.0.0.weight"] == (32, 3, 3, 3)
    assert shapes["features.2.conv.1.0.weight"] == (96, 1, 3, 3)
    assert shapes["features.17.conv.2.weight"] == (320, 960, 1, 1)
    assert shapes["classifier.1.weight"] == (10, 1280)
