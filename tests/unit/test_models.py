"""The built-in models have the papers' sizes, depend on nothing but their seed, and run as an engine needs them to."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

from fednorm.core.expression import literal, parse_term
from fednorm.core.state import Kind, digest, entries, model_state
from fednorm.errors import ConfigError
from fednorm.models import MODELS, ModelInfo, ResidualBlock, build, list_models, register_model
from fednorm.models.calling import call_factory
from fednorm.models.cnn import map_side

# name, arguments of build, parameters, BatchNorm layers, affine values, statistic values
SIZES = [
    ("resnet20", {}, 269_722, 19, 1_376, 1_376),
    ("resnet20", {"shortcut": "B"}, 272_474, 21, 1_568, 1_568),
    ("lenet_cnn", {}, 89_706, 3, 256, 256),
    ("lenet_cnn", {"norm": "none"}, 89_578, 0, 0, 0),
    ("resnet18", {}, 11_173_962, 20, 9_600, 9_600),
    ("resnet18", {"num_classes": 200}, 11_271_432, 20, 9_600, 9_600),
    ("resnet18", {"stem": "imagenet"}, 11_181_642, 20, 9_600, 9_600),
    ("resnet18", {"stem": "imagenet", "num_classes": 200}, 11_279_112, 20, 9_600, 9_600),
    ("resnet18", {"stem": "imagenet", "num_classes": 1000}, 11_689_512, 20, 9_600, 9_600),
    ("mobilenet_v2", {}, 2_236_682, 52, 34_112, 34_112),
    ("mobilenet_v2", {"stem": "imagenet"}, 2_236_682, 52, 34_112, 34_112),
    ("digit_cnn", {}, 14_219_210, 5, 5_632, 5_632),
    ("alexnet_bn", {}, 57_063_498, 7, 18_688, 18_688),
    ("fedbs_cifar_cnn", {}, 2_865_430, 4, 2_000, 2_000),
    ("fedbs_mnist_cnn", {"in_channels": 1}, 29_034, 2, 96, 96),
    ("deeplabv3plus", {}, 5_225_203, 59, 35_232, 35_232),
    ("deeplabv3plus", {"backbone": "resnet50"}, 39_761_331, 61, 56_800, 56_800),
    ("deeplabv3plus", {"backbone": "resnet18"}, 16_017_331, 28, 13_280, 13_280),
    ("small_resnet", {"in_channels": 1}, 19_810, 9, 336, 336),
    ("simple_cnn", {}, 1_626_442, 0, 0, 0),
    ("mlp_bn", {"in_channels": 1}, 118_794, 2, 512, 512),
    ("vit_tiny", {}, 459_370, 0, 1_728, 0),
    ("text_lstm", {}, 49_674, 1, 128, 128),
]


@pytest.mark.parametrize(("name", "arguments", "parameters", "layers", "affine", "statistics"), SIZES)
def test_sizes(name, arguments, parameters, layers, affine, statistics):
    with torch.device("meta"):  # shapes only: some of these models are large
        model = build(name, **arguments)
    count = dict.fromkeys(Kind, 0)
    for entry in entries(model):
        count[entry.kind] += torch.Size(entry.shape).numel()
    norms = [module for module in model.modules() if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d))]
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert (len(norms), count[Kind.AFFINE], count[Kind.STATISTIC]) == (layers, affine, statistics)
    assert count[Kind.COUNTER] == layers


# Every model at the cheapest size that exercises it, both variants where forward differs.
SMALL = [
    ("small_resnet", {"in_channels": 1}, 28),
    ("resnet20", {}, 16),
    ("resnet20", {"shortcut": "B"}, 16),
    ("resnet18", {}, 8),
    ("resnet18", {"stem": "imagenet"}, 32),
    ("lenet_cnn", {}, 32),
    ("lenet_cnn", {"norm": "none"}, 28),
    ("mobilenet_v2", {}, 16),
    ("mobilenet_v2", {"stem": "imagenet"}, 32),
    ("digit_cnn", {}, 28),
    ("alexnet_bn", {}, 63),
    ("fedbs_cifar_cnn", {}, 32),
    ("fedbs_mnist_cnn", {"in_channels": 1}, 28),
    ("simple_cnn", {}, 32),
    ("mlp_bn", {"width": 16, "depth": 3}, 8),
    ("vit_tiny", {}, 28),
    ("text_lstm", {"width": 8, "depth": 2}, 6),
    ("deeplabv3plus", {}, 64),
    ("deeplabv3plus", {"backbone": "resnet18"}, 64),
    ("deeplabv3plus", {"backbone": "resnet50"}, 64),
]


def test_every_model_is_tried_small():
    assert {name for name, _, _ in SMALL} == set(MODELS) == {name for name, *_ in SIZES}


@pytest.mark.parametrize(("name", "arguments", "side"), SMALL)
def test_forward_and_backward(name, arguments, side):
    model = build(name, num_classes=7, image_size=side, **arguments).train()
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, arguments.get("in_channels", 3), side, side, generator=generator)
    if MODELS[name].inputs == "tokens":
        images = torch.randint(1000, (2, side), generator=generator)
    before = images.clone()
    logits = model(images)
    pixels = (side, side) if MODELS[name].task == "segmentation" else ()
    assert logits.shape == (2, 7, *pixels)
    F.cross_entropy(logits, torch.ones(2, *pixels, dtype=torch.long)).backward()
    assert torch.equal(images, before)
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key


@pytest.mark.parametrize("name", ["small_resnet", "resnet20", "lenet_cnn", "fedbs_mnist_cnn", "mlp_bn", "vit_tiny"])
def test_functional_call_under_vmap_equals_one_model_at_a_time(name):
    sizes = {"image_size": 16, "num_classes": 3}
    models = [build(name, seed=seed, **sizes).double().eval() for seed in range(2)]
    stacked = {key: torch.stack([model.state_dict()[key] for model in models]) for key in models[0].state_dict()}
    images = torch.randn(2, 3, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    bare = copy.deepcopy(models[0]).to("meta")

    def loss(state, x):
        return functional_call(bare, state, (x,)).square().sum()

    parameters = {key for key, _ in models[0].named_parameters()}
    trained = {key: tensor for key, tensor in stacked.items() if key in parameters}
    fixed = {key: tensor for key, tensor in stacked.items() if key not in parameters}
    gradient = torch.func.grad(lambda trained, fixed, x: loss(trained | fixed, x))
    together = torch.vmap(gradient)(trained, fixed, images)
    for client, model in enumerate(models):
        model(images[client]).square().sum().backward()
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(together[key][client], parameter.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in {"alexnet_bn", "digit_cnn"}])
def test_state_is_a_pure_function_of_the_seed(name):
    sizes = {"image_size": 16 if name != "fedbs_cifar_cnn" else 32, "num_classes": 3}
    torch.manual_seed(123)
    before = torch.get_rng_state()
    first = digest(model_state(build(name, seed=5, **sizes)))
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert digest(model_state(build(name, seed=5, **sizes))) == first
    assert digest(model_state(build(name, seed=6, **sizes))) != first


def test_defaults_are_the_models_own():
    assert build("deeplabv3plus").classifier[-1].out_channels == MODELS["deeplabv3plus"].num_classes == 19
    assert build("fedbs_mnist_cnn").classifier[0].in_features == 32 * 7 * 7
    assert build("fedbs_mnist_cnn", image_size=32).classifier[0].in_features == 32 * 8 * 8


def test_listing():
    assert list_models()[:3] == ["small_resnet", "resnet20", "resnet18"]
    for name, info in MODELS.items():
        assert isinstance(info, ModelInfo)
        assert info.name == name
        assert info.summary
        assert info.paper
    assert [name for name, info in MODELS.items() if info.task == "segmentation"] == ["deeplabv3plus"]
    assert MODELS["resnet18"].options == ("stem",)
    assert MODELS["small_resnet"].options == ()


def test_none_is_a_word_where_an_option_takes_words():
    term = parse_term("lenet_cnn(norm=none)", "model", "")
    plain = build(term.name, **term.options)
    assert sum(p.numel() for p in plain.parameters()) == 89_578
    assert digest(model_state(plain)) == digest(model_state(build("lenet_cnn", norm="none")))

    def untyped(num_classes, norm="batch"):
        assert norm == "none"
        return nn.Linear(1, num_classes)

    def optional(num_classes, norm: str | None = "batch"):
        assert norm is None
        return nn.Linear(1, num_classes)

    for factory in (untyped, optional):
        assert call_factory("own", factory, {"num_classes": 3}, {"norm": literal("none")}).out_features == 3


def test_a_name_is_registered_once():
    with pytest.raises(ConfigError, match="model 'resnet20' is registered already; choose another name"):
        register_model("resnet20", summary="another", paper="none")(nn.Identity)


def test_residual_blocks_are_found_by_type():
    blocks = {name: [m for m in build(name).modules() if isinstance(m, ResidualBlock)] for name in list_models()[:3]}
    assert {name: len(found) for name, found in blocks.items()} == {"small_resnet": 3, "resnet20": 9, "resnet18": 8}
    for block in (block for found in blocks.values() for block in found):
        block.eval()
        x = torch.randn(2, block.conv1.in_channels, 8, 8, generator=torch.Generator().manual_seed(0))
        assert torch.equal(block(x), torch.relu(block.main(x) + block.shortcut(x)))


def test_option_a_shortcut_subsamples_and_pads_with_zeros():
    block = next(m for m in build("resnet20").modules() if isinstance(m, ResidualBlock) and m.conv1.stride == (2, 2))
    x = torch.randn(2, 16, 8, 8, generator=torch.Generator().manual_seed(0))
    out = block.shortcut(x)
    assert out.shape == (2, 32, 4, 4)
    assert torch.equal(out[:, 8:24], x[:, :, ::2, ::2])
    assert not out[:, :8].any()
    assert not out[:, 24:].any()


def test_dilated_backbones_stop_at_a_sixteenth():
    for backbone in ("mobilenet_v2", "resnet18", "resnet50"):
        with torch.no_grad():
            low, high = build("deeplabv3plus", backbone=backbone).backbone(torch.zeros(2, 3, 64, 64))
        assert (low.shape[-1], high.shape[-1]) == (16, 4)


def test_small_stem_keeps_resolution():
    images = torch.zeros(2, 3, 32, 32)
    sides = {stem: build("mobilenet_v2", stem=stem).features(images).shape[-1] for stem in ("cifar", "imagenet")}
    assert sides == {"cifar": 4, "imagenet": 1}
    sides = {stem: build("resnet18", stem=stem).stage_maps(images)[-1].shape[-1] for stem in ("cifar", "imagenet")}
    assert sides == {"cifar": 4, "imagenet": 1}


@settings(max_examples=60, deadline=None)
@given(
    layers=st.lists(
        st.one_of(
            st.builds(
                lambda k, s, p: nn.Conv2d(1, 1, k, s, p), st.integers(1, 5), st.integers(1, 3), st.integers(0, 2)
            ),
            st.builds(lambda s, c: nn.MaxPool2d(3, s, ceil_mode=c), st.integers(1, 3), st.booleans()),
            st.builds(lambda s, c: nn.AvgPool2d(2, s, ceil_mode=c), st.integers(1, 2), st.booleans()),
        ),
        min_size=1,
        max_size=4,
    ),
    side=st.integers(1, 24),
)
def test_map_side_is_what_torch_makes(layers, side):
    features = nn.Sequential(*layers)
    try:
        made = features(torch.zeros(1, 1, side, side)).shape[-1]
    except RuntimeError:
        made = 0
    assert map_side(features, side) == made


SMALLEST = {
    "lenet_cnn": 8,
    "digit_cnn": 4,
    "alexnet_bn": 63,
    "fedbs_cifar_cnn": 2,
    "fedbs_mnist_cnn": 4,
    "simple_cnn": 6,
}


@pytest.mark.parametrize(("name", "smallest"), SMALLEST.items())
def test_too_small_images_are_refused_with_the_smallest_size(name, smallest):
    with torch.device("meta"):
        with pytest.raises(ConfigError) as caught:
            build(name, image_size=smallest - 1)
        build(name, image_size=smallest)
    assert str(caught.value) == f"model '{name}' needs images of at least {smallest} pixels a side; got {smallest - 1}"


ERRORS = [
    (
        "resnet2O",
        {},
        f"model 'resnet2O' is not known; did you mean 'resnet20'? (`fednorm models` lists all {len(MODELS)})",
    ),
    ("resnet20", {"stem": "cifar"}, "model 'resnet20' has no option 'stem'; its options: shortcut"),
    ("small_resnet", {"width": 3}, "model 'small_resnet' has no option 'width'; its options: none"),
    ("resnet20", {"shortcut": "C"}, "shortcut 'C' is not known; known: A, B."),
    ("resnet18", {"stem": "imagnet"}, "stem 'imagnet' is not known; did you mean 'imagenet'?"),
    ("deeplabv3plus", {"backbone": "resnet5"}, "backbone 'resnet5' is not known; did you mean 'resnet50'?"),
    ("resnet20", {"num_classes": 0}, "num_classes must be a whole number of at least 1; got 0"),
    ("resnet20", {"in_channels": 1.5}, "in_channels must be a whole number of at least 1; got 1.5"),
    ("mlp_bn", {"depth": 0}, "depth must be a whole number of at least 1; got 0"),
    ("mobilenet_v2", {"dropout": 1}, "model 'mobilenet_v2': dropout must be at least 0 and below 1; got 1"),
    ("vit_tiny", {"image_size": 30}, "model 'vit_tiny': image size 30 is no multiple of patch 4; set patch"),
    ("vit_tiny", {"heads": 5}, "model 'vit_tiny': width 96 is no multiple of heads 5; set width or heads"),
]


@pytest.mark.parametrize(("name", "arguments", "text"), ERRORS)
def test_bad_input_gets_one_line(name, arguments, text):
    with pytest.raises(ConfigError) as caught:
        build(name, **arguments)
    assert str(caught.value) == text
