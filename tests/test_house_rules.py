"""Rules about the source itself: nothing that runs foreign code, no name decides, no engine knows a method."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fednorm.methods import known_methods

SOURCE = Path(__file__).parents[1] / "src" / "fednorm"
FILES = sorted(SOURCE.rglob("*.py"))
NAMES = {str(path.relative_to(SOURCE)): path for path in FILES}
every_file = pytest.mark.parametrize("name", NAMES)

_FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml"}
_FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
_FORBIDDEN_ATTRIBUTES = {("torch", "load"), ("torch", "save"), ("os", "system"), ("os", "popen")}
# numpy reads pickles out of an .npy file unless told not to, which is its default; so it must not be told to.
_FORBIDDEN_KEYWORDS = {"shell", "allow_pickle", "weights_only"}


def violations(tree: ast.AST) -> Iterator[str]:
    """What runs or could run code from outside."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in _FORBIDDEN_MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module.split(".")[0] in _FORBIDDEN_MODULES:
                yield node.module
            yield from (f"{node.module}.{a.name}" for a in node.names if (node.module, a.name) in _FORBIDDEN_ATTRIBUTES)
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in _FORBIDDEN_CALLS:
                yield node.func.id
            for keyword in node.keywords:
                is_false = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in _FORBIDDEN_KEYWORDS and not is_false:
                    yield f"{keyword.arg}="
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            dotted = (node.value.id, node.attr)
            yield from [".".join(dotted)] if dotted in _FORBIDDEN_ATTRIBUTES else []


@every_file
def test_no_code_from_outside_is_run(name: str) -> None:
    assert list(violations(ast.parse(NAMES[name].read_text()))) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from yaml import safe_load",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "eval('1')",
        "exec('1')",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "numpy.load('x', allow_pickle=True)",
    ],
)
def test_the_check_finds_what_it_looks_for(text: str) -> None:
    assert list(violations(ast.parse(text)))


# A part of a key is tested by `"bn" in key`, `key.startswith("bn")` and the like.
_HINTS = re.compile(r"bn|(?<!fed)norm|running_|batches_tracked|downsample|gamma|beta", re.IGNORECASE)
_STRING_TESTS = {"startswith", "endswith", "find", "count", "index", "match", "search", "fullmatch"}


def guesses(tree: ast.AST) -> Iterator[str]:
    """String constants that look like parts of a normalization layer's key, used to test another string."""
    for node in ast.walk(tree):
        constants: list[ast.expr] = []
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            container = node.comparators[0]
            if not isinstance(container, ast.Tuple | ast.List | ast.Set | ast.Dict):
                constants = [node.left]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _STRING_TESTS:
            constants = [
                each for argument in node.args[:1] for each in ast.walk(argument) if isinstance(each, ast.expr)
            ]
        for each in constants:
            if isinstance(each, ast.Constant) and isinstance(each.value, str) and _HINTS.search(each.value):
                yield each.value


# A layer's tensors by part, not a key: which parts there are follows from the layer's type.
_BY_PART = {"pieces/merges.py": {"running_std"}, "pieces/weights.py": {"running_var"}}


@every_file
def test_no_parameter_is_recognised_by_its_name(name: str) -> None:
    assert set(guesses(ast.parse(NAMES[name].read_text()))) - _BY_PART.get(name, set()) == set()


@pytest.mark.parametrize("text", ["'bn' in key", "key.endswith('running_mean')", "re.search('norm', key)"])
def test_the_check_finds_guesses(text: str) -> None:
    assert list(guesses(ast.parse(text)))


_ROOMS_WITHOUT_METHODS = ("engines/", "halves/", "scoring/")
_FILES_WITHOUT_METHODS = {"core/step.py", *(f"running/{name}.py" for name in ("plan", "run", "in_step", "evaluate"))}
KNOWS_NO_METHOD = [name for name in NAMES if name.startswith(_ROOMS_WITHOUT_METHODS) or name in _FILES_WITHOUT_METHODS]
# Words that are a method's name and an English or a technical word.
_ORDINARY = {"in", "pooled", "clip", "centralized", "standalone", "uniform", "decoupled", "fold"}


def test_the_files_that_know_no_method_are_there() -> None:
    assert set(NAMES) >= _FILES_WITHOUT_METHODS
    assert {room for room in _ROOMS_WITHOUT_METHODS if any(name.startswith(room) for name in NAMES)} == {
        *_ROOMS_WITHOUT_METHODS
    }


@pytest.mark.parametrize("name", KNOWS_NO_METHOD)
def test_engines_and_server_know_no_method(name: str) -> None:
    """What a string or an identifier says; comments and docstrings may cite a paper."""
    tree = ast.parse(NAMES[name].read_text())
    methods = set(known_methods()) - _ORDINARY
    docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}
    used = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in docs]
    identifiers = [n.id for n in ast.walk(tree) if isinstance(n, ast.Name)]
    identifiers += [a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom | ast.Import) for a in n.names]
    words = {word for text in [*used, *identifiers] if isinstance(text, str) for word in re.findall(r"[\w-]+", text)}
    mentioned = {method for method in methods if method in words or method.replace("-", "_") in words}
    # The one place where a method is named in prose: the advice in an error.
    advised = {"gn", "fedavg"} if name in ("running/plan.py", "halves/prepared.py") else set()
    assert mentioned - advised == set()


@pytest.mark.parametrize("name", KNOWS_NO_METHOD)
def test_engines_and_server_import_no_method(name: str) -> None:
    """They take `parse` from the package of all methods, and nothing from a single one."""
    named = [line.strip() for line in NAMES[name].read_text().splitlines() if "fednorm.methods" in line]
    assert set(named) <= {"from fednorm.methods import parse"}


# What each room of the house may import of the package, also inside functions and for types alone.
_LEARNING = {"core", "layers", "pieces", "methods", "errors"}
# A server and a client tell each other the package's own version: `fednorm` itself.
_HALVES = _LEARNING | {"strategies", "models", "data", "scoring", "halves", "files", "fednorm"}
_RUNNING = _HALVES | {"engines", "running"}
MAY_IMPORT = {
    "errors": set[str](),
    "files": {"errors"},
    "core": {"core", "errors"},
    "layers": {"layers", "core", "errors"},
    "pieces": {"pieces", "layers", "core", "errors"},
    "methods": _LEARNING,
    "strategies": _LEARNING | {"strategies", "data"},
    "data": {"data", "core", "errors", "files"},
    "models": {"models", "layers", "core", "errors"},
    "scoring": _LEARNING | {"data", "scoring"},
    "halves": _HALVES,
    "engines": _HALVES | {"engines"},
    "running": _RUNNING,
    "views": _RUNNING | {"views"},
    "bench": _RUNNING | {"views", "bench"},
    "studies": _RUNNING | {"studies"},
    "nvflare": _RUNNING | {"nvflare"},
    "cli": _RUNNING | {"views", "bench", "studies", "nvflare", "cli"},
    "__main__": {"cli"},
    # The package's own names, imported when they are asked for.
    "__init__": _RUNNING | {"views"},
}
_ROOMS = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}


def room_of(name: str) -> str:
    """The folder of a module, or its own name where it is in none."""
    return name.split("/")[0].removesuffix(".py")


def imported_rooms(tree: ast.AST) -> set[str]:
    """The rooms of this package that a module imports from, anywhere in it."""
    modules: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: a relative import hides which room it is from"
            modules += [f"{node.module}.{each.name}" for each in node.names]
    parts = [module.split(".") for module in modules]
    # `from fednorm import __version__` is of the package itself, `from fednorm import files` of a room.
    return {part[1] if len(part) > 1 and part[1] in _ROOMS else "fednorm" for part in parts if part[0] == "fednorm"}


def forbidden_imports(tree: ast.AST, room: str) -> set[str]:
    return imported_rooms(tree) - MAY_IMPORT[room]


def test_every_room_has_its_rule() -> None:
    assert set(MAY_IMPORT) == _ROOMS


@every_file
def test_imports_go_one_way(name: str) -> None:
    assert forbidden_imports(ast.parse(NAMES[name].read_text()), room_of(name)) == set()


@pytest.mark.parametrize(
    ("room", "text", "found"),
    [
        ("core", "from fednorm.layers.keyed import key_names", "layers"),
        ("data", "import fednorm.halves.site", "halves"),
        ("layers", "def late():\n    from fednorm.pieces import fold", "pieces"),
        ("halves", "if TYPE_CHECKING:\n    from fednorm.engines.base import Engine", "engines"),
        ("engines", "from fednorm import running", "running"),
        ("models", "from fednorm import __version__", "fednorm"),
    ],
)
def test_the_check_finds_imports_the_wrong_way(room: str, text: str, found: str) -> None:
    assert forbidden_imports(ast.parse(text), room) == {found}


@pytest.mark.parametrize(("room", "text"), [("core", "import torch"), ("halves", "from fednorm import __version__")])
def test_the_check_allows_imports_the_right_way(room: str, text: str) -> None:
    assert forbidden_imports(ast.parse(text), room) == set()


@every_file
def test_files_stay_small(name: str) -> None:
    assert len(NAMES[name].read_text().splitlines()) <= (300 if name.startswith("nvflare/") else 400)


def test_test_files_stay_small() -> None:
    here = Path(__file__).parent
    lengths = {path.name: len(path.read_text().splitlines()) for path in here.rglob("*.py")}
    assert {name: length for name, length in lengths.items() if length > 700} == {}


def test_the_median_file_is_short() -> None:
    lengths = sorted(len(path.read_text().splitlines()) for path in FILES)
    assert lengths[len(lengths) // 2] <= 150


@every_file
def test_every_module_says_what_it_is(name: str) -> None:
    text = NAMES[name].read_text()
    if text.strip():
        assert ast.get_docstring(ast.parse(text))


@every_file
def test_the_source_speaks_of_itself_alone(name: str) -> None:
    assert not re.search(r"/work\b|\bissue \d|\bTODO\b|\bFIXME\b", NAMES[name].read_text())


def test_the_core_imports_no_optional_package() -> None:
    """Optional packages are imported inside the function that needs them."""
    optional = {"torchvision", "timm", "matplotlib", "scipy", "PIL", "tensorboard", "wandb", "mlflow"}
    optional |= {"pandas", "pyarrow", "nvflare"}
    for name, path in ((name, path) for name, path in NAMES.items() if room_of(name) != "nvflare"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
                assert (module or "").split(".")[0] not in optional, name
