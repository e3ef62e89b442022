"""The extras of pyproject.toml: each is used by the code, `fednorm doctor` knows them all, and what is used is one."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from fednorm.views.doctor import EXTRAS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Packages whose module has another name.
MODULES = {"pillow": "PIL", "mlflow-skinny": "mlflow"}


def package(requirement: str) -> str:
    return re.split(r"[\s\[<>=~!;]", requirement)[0]


OPTIONAL = {
    extra: tuple(map(package, needed)) for extra, needed in PROJECT["optional-dependencies"].items() if extra != "dev"
}


@cache
def imported() -> set[str]:
    """Modules that the sources import; some are imported by a function that is given their name."""
    found: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {each.name.split(".")[0] for each in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= set(node.module.split("."))  # torch.utils.tensorboard needs tensorboard
            elif isinstance(node, ast.Call) and _called(node) in ("_import_optional", "import_module"):
                found |= {str(each.value) for each in node.args[:1] if isinstance(each, ast.Constant)}
    return found


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


@pytest.mark.parametrize("extra", OPTIONAL)
def test_the_code_uses_every_package_of_an_extra(extra: str) -> None:
    unused = {name for name in OPTIONAL[extra] if MODULES.get(name, name) not in imported()}
    assert unused == set()


def test_the_doctor_looks_for_every_extra() -> None:
    assert EXTRAS == OPTIONAL


def test_every_extra_that_is_asked_for_exists() -> None:
    """`require(module, extra, purpose)` tells users what to install."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and _called(node) == "require":
                given = [argument.value for argument in node.args[:2] if isinstance(argument, ast.Constant)]
                extra = str(given[-1]) if given else ""
                assert not given or extra in OPTIONAL, f"{path}:{node.lineno}"
                modules = [MODULES.get(name, name) for name in OPTIONAL.get(extra, ())]
                assert len(given) < 2 or given[0] in modules, f"{path}:{node.lineno}"


def test_what_is_installed_for_development_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {package(line) for line in lines if line and not line.startswith("#")}
    needed = {package(each) for each in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"])}
    extras = re.findall(r"\w+", re.search(r"fednorm\[(.*)\]", PROJECT["optional-dependencies"]["dev"][0])[1])  # type: ignore[index]
    needed |= {name for extra in extras for name in OPTIONAL[extra]}
    assert needed - {"fednorm"} <= pinned
