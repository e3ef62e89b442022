"""What is installed and what is shipped: every package has a hash, the data their licence, a release its list."""

from __future__ import annotations

import re
import runpy
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


def tool(name: str) -> dict[str, Any]:
    before = list(sys.path)
    try:
        return runpy.run_path(str(ROOT / "tools" / f"{name}.py"))
    finally:
        sys.path[:] = before


def versions(path: Path) -> dict[str, str]:
    """Names in their one spelling, and versions."""
    found = re.findall(r"^([\w.-]+)==(\S+)", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


def test_the_locks_are_the_constraints_with_hashes() -> None:
    pinned = versions(ROOT / "constraints.txt")
    locked = versions(ROOT / "locks" / "requirements.txt") | versions(ROOT / "locks" / "torch.txt")
    assert locked == pinned, "run `make lock`"
    assert versions(ROOT / "locks" / "torch_cpu.txt") == {"torch": f"{pinned['torch']}+cpu"}
    assert versions(ROOT / "locks" / "nvflare.txt") == versions(ROOT / "constraints-nvflare.txt"), "run `make lock`"
    assert {pin.name for pin in tool("locked")["pins"]()} == {
        name for each in ("requirements", "torch") for name in versions(ROOT / "locks" / f"{each}.txt")
    }


@pytest.mark.parametrize("path", sorted((ROOT / "locks").glob("*.txt")), ids=lambda path: path.stem)
def test_every_pin_has_a_hash(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert all(line.startswith(("#", "    --hash=sha256:")) or re.match(r"[\w.-]+==\S+ \\$", line) for line in lines)
    assert all(lines[at + 1].startswith("    --hash") for at, line in enumerate(lines) if "==" in line)


def test_make_installs_by_the_locks() -> None:
    installs = re.findall(r"pip install [^\n]*|\$\(LOCKED\)[^\n|]*", (ROOT / "Makefile").read_text())
    loose = [line for line in installs if "--require-hashes" not in line and "LOCKED" not in line]
    assert loose == [
        "pip install --quiet --no-build-isolation -c constraints.txt -e '.[dev]'",
        "pip install --quiet --no-build-isolation -c constraints.txt -c constraints-nvflare.txt -e '.[dev,nvflare]'",
        # another torch, by hand: the newest has no hash yet
        "pip install --quiet --upgrade -c $(OTHER)/constraints.txt "
        "$(patsubst %,'%',$(OTHER_TORCH)) ml-dtypes -e '.[dev]'",
        "pip install --quiet pip-audit",
        "pip install --quiet uv",
    ]


def test_a_release_has_a_list_of_what_it_was_tested_with() -> None:
    made = tool("make_sbom")["sbom"]()
    assert (made["bomFormat"], made["specVersion"]) == ("CycloneDX", "1.6")
    libraries = {each["name"]: each["version"] for each in made["components"] if each["type"] == "library"}
    assert libraries == {pin.name: pin.version for pin in tool("locked")["pins"]()}
    assert {each["ref"]: len(each["dependsOn"]) for each in made["dependencies"]} == {
        made["metadata"]["component"]["bom-ref"]: len(made["components"])
    }


def test_the_data_inside_the_package_have_their_licence() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0 AND MIT"
    texts = [(ROOT / name).read_text() for name in project["license-files"]]
    assert ["Apache License" in texts[0], "Zalando SE" in texts[1]] == [True, True]
