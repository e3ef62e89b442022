"""What the host does in a round that stays on the device: one run of 5 clients, three such runs in step, one run of 15.

    python benchmarks/host_rounds.py

Rounds of one step are asked for, looked at, written and committed as `compare` does it, with the programs that a device
would play left out, so what remains is the host's. On a GPU the two go on at once: as long as a round takes the host
less than the device, it costs nothing. CPU time is taken of blocks of rounds. Shown are their median and the block that
a tenth of all blocks are below, since other work on the cores makes every block longer by some. No GPU is needed.
Writes benchmarks/results/host_rounds.json.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from fednorm import compare
from fednorm.bench.gpu import BATCH, IMAGES
from fednorm.bench.long_runs import EVERY_STEP
from fednorm.bench.machine import describe_machine
from fednorm.bench.pools import random_images
from fednorm.engines.stack import slot
from fednorm.engines.stack.phase_program import PhaseProgram
from fednorm.files import write_json
from fednorm.running.config import RunConfig, updated
from fednorm.running.records import RoundRow, RunId

VARIANTS = {"one seed": (1, 5), "three seeds": (3, 5), "one of 15 clients": (1, 15)}
"""Runs in step, and the clients of each."""
BLOCK = 96
"""Rounds of a timing, three times what is looked at in one go."""
COMMIT = 1700
"""Rounds between two checkpoints: those of 2 seconds on a GPU."""


def left_out(self: PhaseProgram, name: str, function: Any, fused: bool = True) -> None:
    """In the place of playing a program: its clients report a loss of 1, and that all is well."""
    if self.turn == 0:
        self._own["log"].fill_(1.0)


def timed(runs: int, clients: int, rounds: int) -> list[float]:
    """CPU seconds of a round, by block."""
    settings = {**EVERY_STEP.settings, "rounds": rounds, "engine.name": "stacked", "engine.device": "cpu"}
    settings |= {"engine.threads": 1, "engine.checkpoint_every": COMMIT}
    marks: list[float] = []

    def mark(run: RunId, row: RoundRow) -> None:
        if run.seed == 0 and row["round"] % BLOCK == 0:
            marks.append(time.process_time())

    data = random_images(clients, IMAGES)
    with tempfile.TemporaryDirectory() as folder:
        config = updated(RunConfig(), settings)
        compare(["fedavg"], config, federation=data, seeds=range(runs), out=Path(folder) / "runs", on_row=mark)
    return [(after - before) / BLOCK for before, after in pairwise(marks[2:])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "host_rounds.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    slot.DEVICES = {"cpu"}
    PhaseProgram._run = left_out
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(options.turns):
        for name, (runs, clients) in VARIANTS.items():
            times[name] += timed(runs, clients, options.rounds)
    result: dict[str, Any] = {"benchmark": "host_rounds", **describe_machine(torch.device("cpu"))}
    result["settings"] = {"model": EVERY_STEP.settings["model"], "batch": BATCH, "images a client": IMAGES}
    result["settings"] |= {"rounds": options.rounds, "turns": options.turns, "rounds of a block": BLOCK}
    result["results"] = {}
    for name, each in times.items():
        least, *_ = statistics.quantiles(each, n=10)
        median = statistics.median(each)
        result["results"][name] = {"ms": round(1e3 * least, 4), "median_ms": round(1e3 * median, 4)}
        print(f"{name:18} {1e3 * least:.3f} ms of CPU time a round (median {1e3 * median:.3f})", flush=True)
    least = {name: each["ms"] for name, each in result["results"].items()}
    result["ratio.three/one"] = round(least["three seeds"] / least["one seed"], 3)
    write_json(options.out, result, indent=1)
    print(options.out)


if __name__ == "__main__":
    main()
