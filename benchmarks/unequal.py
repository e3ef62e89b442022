"""What unequal clients cost: an epoch of ResNet20 clients with equal and with unequal shares of as many images.

    python benchmarks/unequal.py                                # a GPU: 100 clients of 100 to 1,900 images, bf16
    python benchmarks/unequal.py --clients 4 --images 40 --rounds 8

Shares are drawn evenly between a tenth and nineteen tenths of `--images`, so almost every client ends its epoch with a
smaller batch. The first rows include what is compiled on the way. Writes benchmarks/results/unequal_DEVICE.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from fednorm.bench.gpu import BATCH, config_of
from fednorm.bench.machine import describe_machine
from fednorm.bench.pools import random_images
from fednorm.bench.timing import steady_seconds
from fednorm.data.client_rows import consecutive_rows
from fednorm.engines.machine import find_device
from fednorm.engines.stack.timetable import timetable
from fednorm.files import write_json
from fednorm.running.plan import make_plan
from fednorm.running.run import Run
from fednorm.running.store import Store

WARM_UP = 4
"""Rounds after which all shapes that come often have their programs."""


def timed(shares: Sequence[int], rounds: int, device: torch.device, precision: str) -> dict[str, Any]:
    """Seconds to the first row and of a later round, of clients with these numbers of images."""
    data = replace(random_images(1, sum(shares)), clients=consecutive_rows(shares))
    data = replace(data, own_test=data.own_test * len(shares))
    config = config_of("resnet20", "stacked", precision, device, local_epochs=1)
    run = Run(make_plan(config, federation=data), Store())
    started = time.perf_counter()
    at = [time.perf_counter() - started for _ in islice(run.rounds(), rounds)]
    seconds = steady_seconds(at[WARM_UP], at[WARM_UP + 1 :])
    return {
        "images": sum(shares),
        **_steps(shares),
        "seconds_to_first_row": at[0],
        "seconds_a_round": seconds,
        "rows_at": at,
    }


def _steps(shares: Sequence[int]) -> dict[str, int]:
    """How many steps an epoch is, and how many of them differ in their clients or the size of their batches."""
    launches = timetable([[BATCH] * (own // BATCH) + [own % BATCH] * (own % BATCH > 0) for own in shares], BATCH)
    return {"steps": len(launches), "kinds_of_steps": len({(each.width, each.size) for each in launches})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--images", type=int, default=1000, help="of a client, on average")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/unequal_DEVICE.json")
    options = parser.parse_args()
    if options.rounds < WARM_UP + 4:
        parser.error(f"--rounds {options.rounds} are too few to time; give at least {WARM_UP + 4}")
    device = find_device(options.device)
    low, high = options.images // 10, options.images * 19 // 10
    draw = torch.Generator().manual_seed(0)
    unequal = torch.randint(max(2, low), high + 1, (options.clients,), generator=draw).tolist()
    equal = [BATCH * max(1, round(sum(unequal) / options.clients / BATCH))] * options.clients
    precision = "bf16" if device.type == "cuda" else "fp32"
    result: dict[str, Any] = {"benchmark": "unequal", **describe_machine(device), "precision": precision}
    for name, shares in (("equal", equal), ("unequal", unequal)):
        found = result[name] = timed(shares, options.rounds, device, precision)
        seconds = found["seconds_a_round"]
        told = f"{seconds:.3f} s a round" if seconds else "no steady rounds"
        first = found["seconds_to_first_row"]
        steps = f"{found['steps']} steps of {found['kinds_of_steps']} kinds"
        print(f"{name:8} {found['images']:8} images, {steps}  first row {first:6.1f} s  {told}", flush=True)
    out = options.out or Path(__file__).parent / "results" / f"unequal_{device.type}.json"
    write_json(out, result, indent=1)
    print(out)


if __name__ == "__main__":
    main()
