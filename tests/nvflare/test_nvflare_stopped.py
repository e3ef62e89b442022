"""A run in the simulator that is asked to end: no process stays behind, and what was merged is gone on from."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from simulated import HERE, LIMIT

from command import fednorm
from fednorm.halves.wire_files import load

EXAMPLES = HERE.parents[1] / "examples" / "nvflare"
sys.path.insert(0, str(EXAMPLES))
from poc import listening, processes  # noqa: E402 (an example, no module of ours)

pytestmark = pytest.mark.nvflare
ROUNDS = 40


def started(folder: Path) -> list[int]:
    """The processes that have anything to do with a folder."""
    return processes(lambda words: any(str(folder) in word for word in words))


def until(so: Callable[[], bool]) -> None:
    """Wait for something to be true."""
    end = time.monotonic() + LIMIT
    while not so():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_signal_ends_all_processes_and_loses_nothing_that_was_merged(tmp_path: Path) -> None:
    # Its name is short: NVFlare's processes have sockets there, whose paths may have 107 characters.
    workspaces, state = Path(tempfile.mkdtemp()), tmp_path / "state"
    words = [str(EXAMPLES / "fedbn.toml"), "--quiet", "--run-id", "mine", "--state-dir", str(state)]
    words += ["--set", f"rounds={ROUNDS}", "--set", "data.train_limit=60", "--set", "eval.every=40"]
    command = [sys.executable, "-m", "fednorm", "nvflare", "run", *words, "--out", str(tmp_path / "first")]
    env = {**os.environ, "TMPDIR": str(workspaces)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        kept = state / "mine" / "server"
        until(lambda: kept.exists() and len(load(kept)[0]["rows"]) > 1)
        at_work = started(workspaces)
        assert len(at_work) >= 3  # the simulator and two sites
        assert listening(at_work) == {"127.0.0.1"}
        run.send_signal(signal.SIGTERM)
        out, err = run.communicate(timeout=LIMIT)
    assert (run.returncode, out) == (128 + signal.SIGTERM, "")
    assert err == f"stopped; continue with the same --run-id mine and --state-dir {state}\n"
    until(lambda: not started(workspaces))
    assert list(workspaces.glob("fednorm-nvflare-*")) == []
    assert not (tmp_path / "first").exists()
    rounds = len(load(kept)[0]["rows"])
    assert rounds < ROUNDS

    done = fednorm("nvflare", "run", *words, "--check", "--out", tmp_path / "second")
    assert (done.code, done.err) == (0, "")
    assert f"run 'mine' goes on after round {rounds} of {ROUNDS}" in (tmp_path / "second" / "nvflare.log").read_text()
