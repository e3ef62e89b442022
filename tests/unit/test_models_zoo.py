"""Models from elsewhere: the user's own factories, and libraries that are missing, broken, or there."""

import importlib.util
import sys

import pytest
import torch

from fednorm.core.state import digest, model_state
from fednorm.errors import ConfigError
from fednorm.models import build

CODE = """
import torch
from torch import nn

def sized(num_classes, image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(image_size, num_classes))

def with_option(in_channels, *, width=4):
    return nn.Conv2d(in_channels, width, 1)

def anything(**keywords):
    return nn.Linear(keywords["in_channels"], keywords["image_size"])

def bare():
    return nn.Linear(3, 3)

def demanding(colour):
    return nn.Linear(3, 3)

def no_module(num_classes):
    return [num_classes]

class Net(nn.Linear):
    def __init__(self, num_classes: int = 2):
        super().__init__(5, num_classes)

constant = 3
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder with a module of the user's; its modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "their_package").mkdir()
    (tmp_path / "their_package" / "nets.py").write_text(CODE)
    (tmp_path / "needs_more.py").write_text("import no_such_dependency\n")
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if name.split(".")[0] in {"their_package", "needs_more", "torchvision", "timm"}:
            del sys.modules[name]


def test_a_factory_gets_the_keywords_it_asks_for(here):
    path = list(sys.path)
    assert build("their_package.nets:sized", num_classes=7, image_size=9)[1].weight.shape == (7, 9)
    assert build("their_package.nets:with_option", in_channels=2).weight.shape == (4, 2, 1, 1)
    assert build("their_package.nets:with_option", width=6).weight.shape == (6, 3, 1, 1)
    assert build("their_package.nets:anything", in_channels=4).weight.shape == (32, 4)
    assert build("their_package.nets:bare").weight.shape == (3, 3)
    assert build("their_package.nets:Net").weight.shape == (10, 5)
    assert sys.path == path


def test_a_factory_is_seeded_and_leaves_the_global_generator_alone(here):
    before = torch.get_rng_state()
    digests = [digest(model_state(build("their_package.nets:Net", seed=seed))) for seed in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]
    assert torch.equal(torch.get_rng_state(), before)


REFUSED = [
    (
        "their_packag.nets:Net",
        {},
        "model 'their_packag.nets:Net': there is no module 'their_packag.nets'; "
        "run in its folder or put that on PYTHONPATH",
    ),
    (
        "their_package.net:Net",
        {},
        "model 'their_package.net:Net': there is no module 'their_package.net'; "
        "run in its folder or put that on PYTHONPATH",
    ),
    ("needs_more:Net", {}, "model 'needs_more:Net': module 'needs_more' needs 'no_such_dependency'; install it"),
    (
        "their_package.nets:sizd",
        {},
        "in module 'their_package.nets', factory 'sizd' is not known; did you mean 'sized'?",
    ),
    ("their_package.nets:constant", {}, "model 'their_package.nets:constant' must be a function or class; it is int"),
    (
        "their_package.nets:no_module",
        {},
        "model 'their_package.nets:no_module' must return a torch.nn.Module; it returned list",
    ),
    (
        "their_package.nets:demanding",
        {},
        "model 'their_package.nets:demanding' cannot be built: missing a required argument: 'colour'; "
        "give it as an option of the model",
    ),
    (
        "their_package.nets:with_option",
        {"depth": 2},
        "model 'their_package.nets:with_option' has no option 'depth'; its options: width",
    ),
    ("builtins:dict", {}, "model 'builtins:dict' does not say what arguments it takes; wrap it in a function"),
    ("a b:c", {}, "model 'a b:c' is no reference to code; expected 'package.module:factory'"),
    ("json:", {}, "model 'json:' is no reference to code; expected 'package.module:factory'"),
    (":f", {}, "model ':f' is no reference to code; expected 'package.module:factory'"),
]


@pytest.mark.parametrize(("name", "options", "text"), REFUSED)
def test_what_cannot_be_built_gets_one_line(here, name, options, text):
    path = list(sys.path)
    with pytest.raises(ConfigError) as caught:
        build(name, **options)
    assert str(caught.value) == text
    assert sys.path == path


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_a_missing_library_is_named_with_its_pip_line(library):
    if importlib.util.find_spec(library) is not None:
        pytest.skip(f"{library} is installed here, so it cannot be missing")
    with pytest.raises(ConfigError) as caught:
        build(f"{library}:resnet18")
    assert str(caught.value) == f"model '{library}:resnet18' needs {library}: pip install \"fednorm[zoo]\""


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_a_library_that_does_not_load_is_one_line(here, monkeypatch, library):
    """torchvision built for another torch fails so at import, and timm with it."""
    (here / f"{library}.py").write_text("raise RuntimeError('operator torchvision::nms does not exist\\nand more')\n")
    monkeypatch.syspath_prepend(str(here))
    monkeypatch.delitem(sys.modules, library, raising=False)
    with pytest.raises(ConfigError) as caught:
        build(f"{library}:resnet18")
    assert str(caught.value) == (
        f"model '{library}:resnet18': {library} is installed but does not load beside torch {torch.__version__} "
        "(operator torchvision::nms does not exist); install the builds that belong together"
    )


def _loads(library):
    try:
        __import__(library)
    except (ImportError, OSError, RuntimeError):
        return False
    return True


@pytest.mark.parametrize(
    ("name", "image_size"),
    [
        ("timm:resnet18", 32),
        ("timm:vit_tiny_patch16_224", 32),
        ("torchvision:resnet18", 32),
        ("torchvision:vit_b_16", 32),
    ],
)
def test_models_of_installed_libraries(name, image_size):
    library = name.partition(":")[0]
    if not _loads(library):
        pytest.skip(f"{library} is not installed or does not load here")
    model = build(name, num_classes=5, image_size=image_size).eval()
    with torch.no_grad():
        assert model(torch.zeros(2, 3, image_size, image_size)).shape == (2, 5)
    assert digest(model_state(model)) == digest(model_state(build(name, num_classes=5, image_size=image_size)))


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("timm:resnet118", {}, "timm model 'resnet118' is not known; did you mean 'resnet18'?"),
        ("torchvision:resnet81", {}, "torchvision model 'resnet81' is not known; did you mean 'resnet18'?"),
        (
            "torchvision:resnet18",
            {"in_channels": 1},
            "model 'torchvision:resnet18' takes images of 3 channels, not 1; timm's models take any number",
        ),
        (
            "torchvision:resnet18",
            {"dropout": 0.1},
            "model 'torchvision:resnet18' refuses its sizes or options: "
            "ResNet.__init__() got an unexpected keyword argument 'dropout'",
        ),
    ],
)
def test_what_installed_libraries_refuse(name, arguments, text):
    library = name.partition(":")[0]
    if not _loads(library):
        pytest.skip(f"{library} is not installed or does not load here")
    with pytest.raises(ConfigError) as caught:
        build(name, **arguments)
    assert str(caught.value) == text
