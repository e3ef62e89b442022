"""The page on own data, done from its first line to its last in an empty folder."""

from __future__ import annotations

import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from command import fednorm
from fednorm.data.own import OWN
from fednorm.models import MODELS

PAGE = (Path(__file__).parents[1] / "docs" / "own_data.md").read_text()
BLOCKS = re.findall(r"```(python|bash)\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def own_names() -> Iterator[None]:
    """What the page registers is forgotten afterwards."""
    yield
    MODELS.pop("listener", None)
    OWN.pop("waves", None)


@pytest.mark.slow
@pytest.mark.usefixtures("own_names")
def test_everything_on_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for language, block in BLOCKS:
        if language == "python":
            name = re.match(r"# (\w+\.py)\n", block)
            file = tmp_path / (name[1] if name else "block.py")
            file.write_text(block)
            if not name:  # what has a name is for `--use`
                runpy.run_path(str(file), run_name="__main__")
        for line in block.splitlines() if language == "bash" else ():
            program, *arguments = shlex.split(line)
            assert program == "fednorm"
            played = fednorm(*arguments)
            assert played.code == 0, f"{line}: {played.err}"
    assert (tmp_path / "runs" / "photos" / "curves.png").exists()
    assert (tmp_path / "runs" / "photos" / "fedbn-seed0" / "client-1.safetensors").exists()
    assert (tmp_path / "scores.csv").read_text().startswith("method,seed,round,protocol,accuracy\n")
