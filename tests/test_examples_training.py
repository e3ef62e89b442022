"""The examples about training are run as they are."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_own_task(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "own_task.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "cost of each client: {" in printed
    assert "percent of targets below the forecast: {" in printed


def test_own_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "own_optimizer.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "fedavg" in printed
    assert "fedavg+local-momentum" in printed
