"""The command line as tests use it: in this process for most, in one of its own where signals matter."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fednorm.cli import exit_code

TINY = (
    *("--set", "data.train_limit=200", "--set", "engine.threads=1", "--set", "eval.every=3"),
    *("--model", "mlp_bn(width=16)", "--rounds", "3", "--local-steps", "1"),
)
"""Settings of a run that takes a second at most."""
# Several processes with several threads each crawl where cores are few.
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def fednorm(*arguments: object) -> Outcome:
    """Run a command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = exit_code([str(argument) for argument in arguments])
    return Outcome(code, out.getvalue(), err.getvalue())


def start(*arguments: object, cwd: Path) -> subprocess.Popen[str]:
    """Start a command line in a process of its own, which Ctrl-C reaches also where the tests run in the background."""
    command = [sys.executable, "-m", "fednorm", *map(str, arguments)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:  # a signal that is ignored stays so in a child, one that is handled does not
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=cwd, env=ONE_THREAD, stdout=pipe, stderr=pipe, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
