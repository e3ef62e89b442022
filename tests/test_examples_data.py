"""The examples of own images and an own table run, on what they make and on what they are given."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from own_files import image_folder, save_table, table_rows

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / name))


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("$ ", "a run would", "fedavg ", "fedbn "))]


@pytest.mark.parametrize("name", ["own_images.py", "own_table.py"])
def test_examples_go_from_a_look_to_an_exported_model(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    example(name)["main"]()
    out = capsys.readouterr().out
    found = lines(out)
    assert [line.split()[2] for line in found if line.startswith("$")] == ["data", "compare", "export"]
    assert "a run would refuse nothing" in found
    assert out.splitlines()[-1].endswith("/runs/fedbn-seed0/client-0.safetensors")


def test_examples_take_data_of_yours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example("own_images.py")["main"](str(image_folder(tmp_path / "images")))
    example("own_table.py")["main"](str(save_table(tmp_path / "people.csv", table_rows())), "sick", "site")
    assert capsys.readouterr().out.count("a run would refuse nothing") == 2
    with pytest.raises(SystemExit) as ended:
        example("own_table.py")["main"](str(tmp_path / "people.csv"), "sik", "site")
    assert ended.value.code == 2
    assert "did you mean 'sick'?" in capsys.readouterr().out
