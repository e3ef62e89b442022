"""Runs that are stopped, politely or not, go on to the same bits."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from command import TINY, fednorm, start
from fednorm.running.folder import RunFolder
from fednorm.running.store import Store

# Enough rounds that a signal always finds the run at work, seconds of them: whoever sends it may have to wait for a
# core. Scoring only at the end keeps them cheap.
ROUNDS = 200
EVERY_OTHER = ("--set", "engine.checkpoint_every=2")
LONG = (*TINY, *EVERY_OTHER, "--rounds", ROUNDS, "--set", f"eval.every={ROUNDS}", "--method", "fedbn+local-momentum")
PATIENCE = 600
"""Seconds after which what a test waits for will not come."""


@contextlib.contextmanager
def running(*arguments: object, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """A command line at work, which does not outlive the test."""
    process = start(*arguments, cwd=cwd)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for_rounds(process: subprocess.Popen[str], folder: Path, count: int) -> None:
    """Wait until a run has played some rounds."""
    limit = time.monotonic() + PATIENCE
    metrics = folder / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") >= count):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit, f"{folder} did not get to round {count}"
        time.sleep(0.01)


def committed(folder: Path) -> int:
    """The round from which a run would go on."""
    store = Store(RunFolder(folder).state)
    try:
        return store.facts()["round"]
    finally:
        store.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the run that nobody stops."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    done = fednorm("run", *LONG, "--out", folder, "--json", "--quiet")
    assert done.code == 0, done.err
    return done.json["runs"][0]["digest"]


@pytest.mark.fault(row=18)
@pytest.mark.fault(row=20)
def test_kill_and_resume_give_the_same_bits(tmp_path: Path, whole: str) -> None:
    with running("run", *LONG, "--out", "run", cwd=tmp_path) as process:
        wait_for_rounds(process, tmp_path / "run", 3)
        process.kill()
        process.communicate()
    assert not (tmp_path / "run" / "result.json").exists()
    assert 2 <= committed(tmp_path / "run") < ROUNDS
    done = fednorm("resume", tmp_path / "run", "--json", "--quiet")
    assert done.json["runs"][0]["digest"] == whole
    rows = [json.loads(line)["round"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows == list(range(1, ROUNDS + 1)), "no round is missing or there twice"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.fault(row=19)
def test_a_signal_stops_between_rounds_and_says_how_to_go_on(
    number: signal.Signals, code: int, tmp_path: Path, whole: str
) -> None:
    with running("run", *LONG, "--out", "run", cwd=tmp_path) as process:
        wait_for_rounds(process, tmp_path / "run", 3)
        process.send_signal(number)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == code
    stopped = (tmp_path / "run" / "metrics.jsonl").read_text().count("\n")
    assert err == f"stopped after round {stopped}; continue with: fednorm resume run\n"
    assert 3 <= committed(tmp_path / "run") == stopped < ROUNDS
    assert fednorm("resume", tmp_path / "run", "--json", "--quiet").json["runs"][0]["digest"] == whole


def test_a_killed_comparison_leaves_no_worker_behind(tmp_path: Path) -> None:
    names = ("fedavg-seed0", "fedbn-seed0")
    with running("compare", "fedavg", "fedbn", *LONG[:-2], "--jobs", "2", "--out", "both", cwd=tmp_path) as process:
        for name in names:
            wait_for_rounds(process, tmp_path / "both" / name, 2)
        owners = [int((tmp_path / "both" / name / ".lock").read_text()) for name in names]
        process.kill()
        process.communicate()
    limit = time.monotonic() + PATIENCE
    while any(_alive(owner) for owner in owners):
        assert time.monotonic() < limit, "workers outlived the process that started them"
        time.sleep(0.1)
    rounds = [committed(tmp_path / "both" / name) for name in names]
    assert min(rounds) >= 2
    assert min(rounds) < ROUNDS, "one may be over by the time the other begins"
    done = fednorm("resume", tmp_path / "both", "--json", "--quiet")
    assert [run["rounds_done"] for run in done.json["runs"]] == [ROUNDS, ROUNDS]


@pytest.mark.fault(row=19)
def test_ctrl_c_ends_all_workers_of_a_comparison(tmp_path: Path) -> None:
    endless = (*TINY, *EVERY_OTHER, "--rounds", "100000", "--jobs", "2", "--out", "both")
    with running("compare", "fedavg", "fedbn", *endless, cwd=tmp_path) as process:
        wait_for_rounds(process, tmp_path / "both" / "fedavg-seed0", 2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert err == "stopped with 0 of 2 runs done; continue with: fednorm resume both\n"


@pytest.mark.fault(row=19)
def test_ctrl_c_twice_ends_a_comparison_without_a_traceback(tmp_path: Path) -> None:
    names = ("fedavg-seed0", "fedbn-seed0")
    endless = (*TINY, *EVERY_OTHER, "--rounds", "100000", "--jobs", "2", "--out", "both")
    with running("compare", "fedavg", "fedbn", *endless, cwd=tmp_path) as process:
        for name in names:
            wait_for_rounds(process, tmp_path / "both" / name, 4)
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.002)  # else the system may make one of two
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert err == "stopped with 0 of 2 runs done; continue with: fednorm resume both\n"
    assert all(committed(tmp_path / "both" / name) >= 2 for name in names)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
