"""What runs in one stack cost: three seeds of 5 clients in step, against one run of 15 clients on as many images.

    python benchmarks/packed.py                     # a GPU: ResNet20, batch 20, bf16
    python benchmarks/packed.py --whole 64000       # and 64,000 rounds of one seed and of three, with all their files
    python benchmarks/packed.py --device cpu --model mlp_bn --rounds 20

All variants are timed in turn, in one process, with a merge after every step and after 100. Beside the time of a round
are two parts of it that go on at once: what the device takes for the same programs played again and again
(`device_ms`), and what the host takes to ask for rounds that it does not wait for (`host_ms`). The larger one is the
limit; on a CPU the host plays them too. Writes benchmarks/results/gpu_packed.json.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fednorm import compare
from fednorm.bench.gpu import BATCH, IMAGES, config_of
from fednorm.bench.long_runs import EVERY_STEP
from fednorm.bench.machine import describe_machine
from fednorm.bench.plain_steps import backends
from fednorm.bench.pools import random_images
from fednorm.bench.timing import Play, Rounds, synchronize
from fednorm.engines.machine import find_device, precision
from fednorm.engines.stack import slot
from fednorm.files import write_json
from fednorm.running.config import RunConfig, updated
from fednorm.running.in_step import play_in_step, play_round
from fednorm.running.plan import make_plan
from fednorm.running.records import RoundRow
from fednorm.running.run import Run
from fednorm.running.same_program import engine_maker
from fednorm.running.store import Store

WHOLE = 64_000
AHEAD = 24
"""Rounds the host asks for without waiting, fewer than a device remembers."""


@dataclass(frozen=True)
class Variant:
    """Some runs in step, with as many clients each."""

    name: str
    runs: int
    clients: int


class Pack:
    """Runs in step, timed as if they were one: its rows are those of the first."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs

    @property
    def unsettled(self) -> list[Any]:
        return self.runs[0].unsettled

    @property
    def round(self) -> int:
        return self.runs[0].round

    def settle(self, count: int) -> None:
        for run in self.runs:
            run.settle(min(count, len(run.unsettled)))

    def rounds(self) -> Generator[RoundRow]:
        for run, news in play_in_step(self.runs):
            if isinstance(news, Exception):
                raise news
            if run is self.runs[0]:
                yield news


@dataclass(frozen=True)
class Started:
    """A variant whose first rounds are played."""

    pack: Pack
    play: Play
    first_row: float
    """seconds to it, from the plan on"""


def started(variant: Variant, model: str, steps: int, width: str, device: torch.device) -> Started:
    """A variant's runs, with seeds of their own, on the same images."""
    config = config_of(model, "stacked", width, device, local_steps=steps)
    begun = time.perf_counter()
    data = random_images(variant.clients, IMAGES)
    plans = [make_plan(updated(config, {"seed": seed}), federation=data) for seed in range(variant.runs)]
    make = engine_maker(plans)
    pack = Pack([Run(plan, Store(), make=make) for plan in plans])
    play = Rounds(pack, device)
    play(0.0)
    return Started(pack, play, time.perf_counter() - begun)


def timed(variants: Sequence[Variant], options: argparse.Namespace, steps: int, width: str) -> dict[str, Any]:
    """What each variant takes, with this many steps a round."""
    device = find_device(options.device)
    rounds = max(1, options.rounds // steps)
    with backends(width, search=None):
        ready = {each.name: started(each, options.model, steps, width, device) for each in variants}
        pace = {name: each.play(0.0) for name, each in ready.items()}
        times: dict[str, list[float]] = {name: [] for name in ready}
        for _ in range(options.turns):
            for name, each in ready.items():
                times[name].append(each.play(rounds * pace[name]))
        return {name: _result(each, times[name], width, device) for name, each in ready.items()}


def _result(found: Started, times: Sequence[float], width: str, device: torch.device) -> dict[str, Any]:
    runs, median = found.pack.runs, statistics.median(times)
    steps = runs[0].plan.work.amount
    whole_run = {f"seconds_of_{WHOLE}_rounds_extrapolated": found.first_row + WHOLE * median} if steps == 1 else {}
    with precision(width):
        for run in runs:
            run.settle(len(run.unsettled))
        ahead = max(1, AHEAD // steps)
        host = _each(ahead, lambda: play_round(runs), device, wait=False)
        (program,) = slot_of(runs[0]).stack._programs.values()
        device_time = _each(ahead, program._play, device, wait=True)
    return {
        "runs": len(runs),
        "clients": len(runs[0].plan.federation.clients),
        "ms_a_round": 1e3 * median,
        "timings": [1e3 * each for each in times],
        "device_ms": 1e3 * device_time,
        "host_ms": 1e3 * host,
        "seconds_to_first_rows": found.first_row,
        **whole_run,
    }


def slot_of(run: Run) -> slot.StackSlot:
    """Where a run lies in its stack; a benchmark of stacks has no use for a run without."""
    if not isinstance(run.server.held, slot.StackSlot):
        raise SystemExit("its rounds do not stay on the device; nothing to measure")
    return run.server.held


def _each(times: int, unit: Callable[[], object], device: torch.device, *, wait: bool) -> float:
    """Seconds of one of some calls in a row; with or without waiting for the device behind them."""
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(times):
        unit()
    if wait:
        synchronize(device)
    taken = time.perf_counter() - begun
    synchronize(device)
    return taken / times


def whole(rounds: int, seeds: Sequence[int], options: argparse.Namespace, width: str) -> float:
    """Seconds from the config to the last file of so many rounds of 5 clients with one step each."""
    settings = {**EVERY_STEP.settings, "model": options.model, "rounds": rounds}
    settings |= {"engine.name": "stacked", "engine.precision": width, "engine.device": options.device}
    data = random_images(options.clients, IMAGES)
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        compare(["fedavg"], updated(RunConfig(), settings), federation=data, seeds=seeds, out=Path(folder) / "runs")
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--clients", type=int, default=5, help="of a run")
    parser.add_argument("--steps", type=int, nargs="+", help="local steps a round; default: 1 and 100, on a CPU 4")
    parser.add_argument("--rounds", type=int, default=2000, help="of one timing; fewer with more steps a round")
    parser.add_argument("--turns", type=int, default=3, help="timings of each variant")
    parser.add_argument("--whole", type=int, default=0, help="play whole runs of so many rounds too")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="default: gpu_packed.json, or cpu_packed.json, in benchmarks/results")
    options = parser.parse_args()
    device = find_device(options.device)
    options.device = str(device)
    slot.DEVICES = {device.type}  # also a CPU, where rounds do not stay otherwise, to try this out
    width = "bf16" if device.type == "cuda" else "fp32"
    runs, clients = options.runs, options.clients
    variants = [
        Variant("packed", runs, clients), Variant("single", 1, runs * clients), Variant("one seed", 1, clients)
    ]  # fmt: skip
    settings = {"model": options.model, "batch": BATCH, "images a client": IMAGES, "augment": "crop(2)+flip"}
    settings |= {"precision": width, "rounds": options.rounds, "turns": options.turns, "data": "random"}
    result: dict[str, Any] = {"benchmark": "packed", **describe_machine(device), "ratio.packed/single": {}}
    result |= {"settings": settings, "results": {}}
    for steps in options.steps or (1, 100 if device.type == "cuda" else 4):
        found = result["results"][f"E={steps}"] = timed(variants, options, steps, width)
        ratio = found["packed"]["ms_a_round"] / found["single"]["ms_a_round"]
        result["ratio.packed/single"][f"E={steps}"] = round(ratio, 4)
        for name, each in found.items():
            parts = f"device {each['device_ms']:8.3f}  host {each['host_ms']:8.3f}"
            print(f"E={steps:<4} {name:9} {each['ms_a_round']:9.3f} ms a round  {parts}", flush=True)
        print(f"E={steps:<4} packed/single {ratio:.3f}", flush=True)
    if options.whole:
        for name, seeds in (("packed", range(runs)), ("one seed", range(1))):
            seconds = whole(options.whole, list(seeds), options, width)
            result.setdefault(f"seconds_of_{options.whole}_rounds", {})[name] = round(seconds, 2)
            print(f"{options.whole} rounds, {name}: {seconds:.1f} s", flush=True)
    name = "gpu_packed.json" if device.type == "cuda" else f"{device.type}_packed.json"
    out = options.out or Path(__file__).parent / "results" / name
    write_json(out, result, indent=1)
    print(out)


if __name__ == "__main__":
    main()
