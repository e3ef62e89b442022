"""What the README shows works: its Python runs, its commands exist with their flags, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from command import ONE_THREAD
from fednorm import known_methods
from fednorm.cli import app
from fednorm.running.on_clock import full_name
from fednorm.strategies import parse as parse_strategy

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [path.name for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md")]


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


COMMANDS = [line.partition("#")[0].strip() for block in blocks("bash") for line in block.splitlines() if line.strip()]


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python_blocks_run(number: int) -> None:
    code = blocks("python")[number]
    done = subprocess.run(
        [sys.executable, "-"], input=code, env=ONE_THREAD, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "pooled" in done.stdout


def test_the_example_of_the_api_is_short() -> None:
    assert len([line for line in blocks("python")[0].splitlines() if line.strip()]) <= 15


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_exist(line: str) -> None:
    words = shlex.split(line)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        return
    if words[:2] == ["pip", "install"]:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(re.findall(r"\[(.*)\]", line)) <= extras.keys()
        return
    assert words[0] == "fednorm"
    command: Any = typer.main.get_command(app)
    for word in words[1:]:
        if word not in getattr(command, "commands", {}):
            break
        command = command.commands[word]
    assert not hasattr(command, "commands"), "a verb of this group must follow"
    known = {name for parameter in command.params for name in parameter.opts}
    assert {word for word in words if word.startswith("-")} <= known
    if words[1] == "compare":
        methods = words[2 : next(i for i, word in enumerate(words) if word.startswith("-"))]
        assert [full_name(method) for method in methods] == methods
    if "--method" in words:
        full_name(words[words.index("--method") + 1])
    if "--async" in words:
        parse_strategy(words[words.index("--async") + 1])


def test_methods_named_in_tables_exist() -> None:
    rows = [line for line in README.splitlines() if line.startswith("|") and "`" in line]
    named = {word for row in rows for cell in row.split("|")[1:3] for word in re.findall(r"`([^`]+)`", cell)}
    known = set(known_methods())
    assert named
    for expression in named - {"fednorm methods", "fednorm resume"}:
        assert all(part in known for part in expression.strip("+").split("+")), expression


def test_every_link_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
            assert target.startswith("https://") or (ROOT / target).exists(), f"{page}: {target}"


def test_the_page_of_the_command_line_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import make_docs

    assert (ROOT / "docs" / "cli.md").read_text() == make_docs.cli_page(), "run `make docs`"
    sys.modules.pop("make_docs")
