"""Runs of examples/own_transport.py for the tests: many in one process that has torch imported, or with random kills.

python transport_script.py play METHOD PER_ROUND ...   prints a line of JSON for each pair: results here and there
python transport_script.py kill METHOD SEED KILLS      kills and restarts its processes at random
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_transport.py"
FORK = multiprocessing.get_context("fork")


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("own_transport", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load_example()
settle = example.settle


class Processes:
    """The server and the clients of a run; any of them can be killed and is started again."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.running = {number: self.start(number) for number in range(-1, args.clients)}

    def start(self, number: int) -> Any:
        work, own = (example.serve, ()) if number < 0 else (example.take_part, (number,))
        process = FORK.Process(target=work, args=(self.args, self.folder, *own))
        process.start()
        return process

    def kill(self, number: int) -> bool:
        """Kill a process that still runs, and start it again; whether it did."""
        process = self.running[number]
        if process.exitcode is not None:
            return False
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        if (self.folder / "result").exists():
            return False
        self.running[number] = self.start(number)
        return True

    def join(self) -> None:
        for process in self.running.values():
            process.join()

    def results(self) -> dict[str, Any]:
        wire, digest = example.wire, example.digest
        kept = [digest(wire.load_mine(path).accepted.tree) for path in sorted(self.folder.glob("client-???"))]
        return {**wire.load(self.folder / "result")[0], "clients": kept}


def settings(method: str, per_round: int, rounds: int = 6) -> argparse.Namespace:
    """The flags of a run; data and model are made once, before the processes part, which saves most of the time."""
    args = argparse.Namespace(method=method, clients=4, per_round=per_round, rounds=rounds)
    made = settle(args)
    example.settle = lambda _: made
    return args


def play(method: str, per_round: int) -> None:
    args = settings(method, per_round)
    processes = Processes(args, Path(tempfile.mkdtemp()))
    processes.join()
    print(json.dumps({"there": processes.results(), "here": example.in_simulator(args)}), flush=True)


def play_with_kills(method: str, seed: int, kills: int) -> None:
    """Kills come at random moments of random processes, until there were enough; the run is begun anew if it ends."""
    draw = random.Random(seed)  # noqa: S311
    args = settings(method, 2, rounds=12)
    runs: list[dict[str, Any]] = []
    done = {"server": 0, "client": 0}
    while sum(done.values()) < kills:
        processes = Processes(args, Path(tempfile.mkdtemp()))
        while not (processes.folder / "result").exists():
            time.sleep(draw.uniform(0.02, 0.25))
            number = draw.choice([-1, -1, *range(args.clients)])
            if sum(done.values()) < kills and processes.kill(number):
                done["server" if number < 0 else "client"] += 1
        processes.join()
        runs.append(processes.results())
    print(json.dumps({"kills": done, "runs": runs, "here": example.in_simulator(args)}), flush=True)


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    if what == "kill":
        play_with_kills(words[0], int(words[1]), int(words[2]))
    for method, per_round in zip(words[::2], words[1::2], strict=True) if what == "play" else ():
        play(method, int(per_round))
