"""CPU time of a round of ten small clients: the plain loop, our steps alone, and our engines, played in turn.

    python benchmarks/cpu_time.py

`fednorm bench cpu` takes the time on the wall, which only quiet cores tell. On a machine with other work, the CPU time
of all processes of a variant says what it costs: each round of each variant is one timing, variants take turns in
another order each time, and medians and quartiles are shown. Workers share out the same work, so their CPU time by the
number of processes is what a round takes at least. Writes benchmarks/results/cpu_time.json.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from fednorm.bench.cpu_rounds import CLIENTS, Round, bare_round, federation, our_round, plain_round
from fednorm.bench.machine import describe_machine
from fednorm.bench.timing import TICKS
from fednorm.files import write_json

PLAIN, BARE, SEQUENTIAL, WORKERS = "plain", "bare steps", "sequential", "workers"


def cpu_seconds() -> float:
    """CPU seconds of this process and of those it started; the latter in ticks of 10 ms."""
    children = (Path(f"/proc/{child.pid}/stat").read_text() for child in multiprocessing.active_children())
    ticks = sum(sum(map(int, stat.rpartition(")")[2].split()[11:13])) for stat in children)
    return time.process_time() + ticks / TICKS


def timed(variants: dict[str, Round], turns: int, batch: dict[str, int]) -> dict[str, list[float]]:
    """CPU seconds of a round, in each turn."""
    draw = random.Random(0)  # noqa: S311
    times: dict[str, list[float]] = {name: [] for name in variants}
    for play in variants.values():
        for _ in range(2):
            play()
    for _ in range(turns):
        for name in draw.sample(list(variants), len(variants)):
            before = cpu_seconds()
            for _ in range(batch[name]):
                variants[name]()
            times[name].append((cpu_seconds() - before) / batch[name])
    return times


def result(times: dict[str, list[float]]) -> dict[str, Any]:
    """Medians and quartiles in milliseconds, and ratios."""
    found: dict[str, Any] = {}
    for name, values in times.items():
        low, median, high = statistics.quantiles(values, n=4)
        found[name] = {"ms": round(1e3 * median, 3), "quartiles": [round(1e3 * low, 3), round(1e3 * high, 3)]}
    plain = found[PLAIN]["ms"]
    added = [whole - bare for whole, bare in zip(times[SEQUENTIAL], times[BARE], strict=True)]
    return {
        "cpu_time": found,
        "ratio.cpu_time/plain": {name: round(each["ms"] / plain, 4) for name, each in found.items() if name != PLAIN},
        "overhead_ms": round(1e3 * statistics.median(added), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--turns", type=int, default=20, help="at one step a round; fewer with more")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cpu_time.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = federation()
    stored: dict[str, Any] = {"benchmark": "cpu_time", **describe_machine(torch.device("cpu"))}
    stored |= {"load_before": round(os.getloadavg()[0], 2), "clients": CLIENTS, "turns": options.turns, "results": {}}
    for steps in options.steps:
        variants = {PLAIN: plain_round(data, steps, 1), BARE: bare_round(data, steps)}
        variants |= {name: our_round(data, steps, 1, name) for name in (SEQUENTIAL, WORKERS)}
        # Ticks are coarse: several rounds of workers make one timing, unless a round is long.
        batch = dict.fromkeys(variants, 1) | {WORKERS: max(1, 4 // steps)}
        found = result(timed(variants, max(4, options.turns // steps), batch))
        stored["results"][f"E={steps}"] = found
        print(f"E={steps}", found, flush=True)
        write_json(options.out, stored, indent=1)
    print(options.out)


if __name__ == "__main__":
    main()
