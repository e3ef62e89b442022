"""examples/own_transport.py with real processes and real sockets: equal to the simulator, also after kills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PATIENCE = 900
"""Seconds after which a script hangs that takes a minute at most where nobody else is at work."""
EXAMPLE = HERE.parent / "examples" / "own_transport.py"
ONE_STAGE = ("fedavg", "fedprox", "fedbn", "silobn", "fedwon", "decoupled", "hbn", "posthoc", "sbn", "fedadam", "brn")
ONE_STAGE += ("fedavg+local-momentum", "fedavg+global-momentum")
TWO_STAGES = ("fixbn", "fixbn(at=window,window=2,tau=100.0)", "fedbs(eps=100.0,rounds=2)", "fedadam+fixbn")


def script(*words: object) -> list[dict[str, Any]]:
    """The lines that the script prints."""
    command = [sys.executable, str(HERE / "transport_script.py"), *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("per_round", [4, 2])
@pytest.mark.parametrize("methods", [ONE_STAGE[:7], ONE_STAGE[7:], TWO_STAGES], ids=["one", "more", "two stages"])
def test_processes_and_simulator_end_with_the_same_bits(methods: tuple[str, ...], per_round: int) -> None:
    lines = script("play", *(word for method in methods for word in (method, per_round)))
    for method, line in zip(methods, lines, strict=True):
        assert line["there"] == line["here"], method
        assert set(line["there"]["stages"]) == ({0, 1} if methods == TWO_STAGES else {0}), method
        assert len(line["there"]["clients"]) == 4


@pytest.mark.slow
@pytest.mark.parametrize(("method", "seed"), [("hbn", 0), ("fedbn+local-momentum", 1)])
def test_forty_kills_change_no_bit(method: str, seed: int) -> None:
    (line,) = script("kill", method, seed, 20)
    assert sum(line["kills"].values()) == 20
    assert all(line["kills"].values())
    assert all(run == line["here"] for run in line["runs"])


def test_the_example_is_short_and_says_what_it_cannot_do() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 100
    command = [sys.executable, str(EXAMPLE), "--method", "fedtan"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "own_transport.py: error: 'fedtan' needs all clients of a round in lock-step, which only the simulator has; "
        "use fednorm.run, or another method here"
    )


@pytest.mark.slow
def test_check_says_with_its_exit_code_that_all_is_equal() -> None:
    command = [sys.executable, str(EXAMPLE), "--method", "silobn", "--clients", "3", "--rounds", "3", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert "'stages': [0, 0, 0]" in done.stdout
