"""Other simulators, each in an environment of its own: scripts that play the same workload and print one JSON line.

A peer NAME is there if a folder holds both `run_NAME.py` and `envs/NAME/bin/python`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from fednorm.bench.timing import Play, Tell
from fednorm.errors import FednormError

WARM = 3
"""Rounds a peer plays before those that count."""
LIMIT_SECONDS = 180


@dataclass(frozen=True)
class Peer:
    """A script and the Python that has what it imports."""

    PREFIX: ClassVar[str] = "peer: "
    script: Path
    python: Path

    @property
    def name(self) -> str:
        return self.PREFIX + peer_of(self.script)

    def player(self, steps: int, cores: int, notes: MutableMapping[str, str]) -> Play:
        """Each timing is a process of its own, which warms up by itself; a failed one is no number."""

        def play(seconds: float) -> float:
            if seconds == 0:
                return math.nan
            rounds = WARM + (20 if steps == 1 else 8)
            try:
                told = self.ask("--steps", steps, "--rounds", rounds, "--cores", cores)
            except FednormError as problem:  # others are still in the race
                notes[self.name] = str(problem).partition(";")[0]
                return math.nan
            notes[self.name] = f"{told['version']}, {told['how']}"
            return statistics.median(told["seconds"][WARM:])

        return play

    def ask(self, *arguments: object) -> dict[str, Any]:
        """What the script says of itself and its rounds."""
        command = [str(self.python), str(self.script), *map(str, arguments)]
        # A session of its own, so that all it started can be ended with it.
        process = subprocess.Popen(  # noqa: S603
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=LIMIT_SECONDS)
        except BaseException as problem:
            _end(process)
            if not isinstance(problem, subprocess.TimeoutExpired):
                raise
            out, err = "", f"it took more than {LIMIT_SECONDS} s"
        for line in reversed(out.splitlines()):
            if line.startswith('{"peer"'):
                return json.loads(line)
        last = (err.strip().splitlines() or ["it printed nothing"])[-1]
        raise FednormError(f"{self.name} failed ({last}); run it alone: {' '.join(command)}")


def _end(process: subprocess.Popen[str]) -> None:
    """End a peer and its processes, politely first: simulators have servers to take down."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=5)


def peer_of(script: Path) -> str:
    """The peer that a script runs.

    >>> peer_of(Path("peers/run_pfl.py"))
    'pfl'
    """
    return script.stem.removeprefix("run_")


def environment() -> dict[str, str]:
    """Ours, less what would make another Python see our packages or obey our thread counts."""
    ours = ("PYTHONPATH", "PYTHONSAFEPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    return {name: value for name, value in os.environ.items() if name not in ours}


def find_peers(folder: Path, tell: Tell) -> list[Peer]:
    """The peers that a folder has both a script and an environment for, less those that cannot play a round."""
    scripts = sorted(folder.glob("run_*.py"))
    found = [Peer(script, folder / "envs" / peer_of(script) / "bin" / "python") for script in scripts]
    able = []
    for peer in found:
        if not peer.python.exists():
            continue
        try:
            told = peer.ask("--steps", 1, "--rounds", 1, "--cores", 1)
        except FednormError as problem:
            tell(f"left out: {problem}")
        else:
            tell(f"{peer.name} {told['version']}")
            able.append(peer)
    if not able:
        tell(f"no peer is installed below {folder / 'envs'}; its README says how")
    return able
