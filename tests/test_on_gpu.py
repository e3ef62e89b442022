"""The script that plays all that wants a GPU: its order, its limits, and that it goes on after a stop."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "on_gpu.py"
spec = importlib.util.spec_from_file_location("on_gpu", SCRIPT)
assert spec
assert spec.loader
on_gpu = importlib.util.module_from_spec(spec)
sys.modules["on_gpu"] = on_gpu
spec.loader.exec_module(on_gpu)

WRITES = "import sys; open(sys.argv[2], 'w').write('[1]'); print('measured')"


def test_parts_are_played_once_and_one_that_fails_stops_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [
        on_gpu.Part("wrong", ("-c", "raise SystemExit(3)"), 1, writes=False),
        on_gpu.Part("right", ("-c", WRITES), 1),
    ]
    assert on_gpu.play_all(parts, 1, tmp_path) == 1
    assert json.loads((tmp_path / "right.json").read_text()) == [1]
    assert (tmp_path / "right.log").read_text() == "measured\n"
    assert on_gpu.play_all(parts[1:], 1, tmp_path) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "wrong: failed with exit code 3"
    assert told[1].startswith("right: done in ")
    assert told[2] == "right: was there"


def test_a_part_that_takes_too_long_is_interrupted_and_has_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it wrote until then is there, but not under the name of a result."""
    slow = f"{WRITES}; sys.stdout.flush(); import time; time.sleep(600)"
    parts = [on_gpu.Part("slow", ("-c", slow), 0.1), on_gpu.Part("late", ("-c", WRITES), 1)]
    assert on_gpu.play_all(parts, 0.1, tmp_path) == 2
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["slow.partial.json"]
    told = capsys.readouterr().out
    assert told.startswith("slow: interrupted after ")
    assert told.endswith("late: not played, time is over\n")


def test_a_part_that_is_not_known_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path / "out"), "--parts", "gpu,cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--parts cpu is not known; give some of kernels,same_bits,gpu," in done.stderr
    assert not (tmp_path / "out").exists()


def test_every_part_is_a_command_that_there_is() -> None:
    for part in on_gpu.PARTS:
        if part.command[0] != "-m":
            assert (SCRIPT.parents[1] / part.command[0]).is_file()
