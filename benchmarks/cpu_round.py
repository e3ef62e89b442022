"""Seconds a round on the CPU: ten clients of a small network, in a plain PyTorch loop and in each of our engines.

    python benchmarks/cpu_round.py
    python benchmarks/cpu_round.py --steps 1 --turns 5 --out /tmp/quick.json

Convolution 3x3 (3 to 16) + BN + ReLU + pooling, convolution 3x3 (16 to 32) + BN + ReLU + pooling, linear (2048 to 10);
batches of 20 random 32x32 images, plain SGD. All variants are timed in turn, again and again in another order. Engines
with several threads or processes suffer most from other work on the machine, so each timing waits until the cores are
idle and counts only if other programs took less than 5 % of them meanwhile; how many did is part of the result.
"bare" is a loop over our own steps and their batches: a round less that is what the framework costs.
Writes benchmarks/results/cpu_round.json and prints its table.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from fednorm.client import training_mode
from fednorm.config import RunConfig, updated
from fednorm.data.federation import Federation, from_clients
from fednorm.engines.base import Job, start_state, step_spec, to_trees
from fednorm.engines.rounds import Run
from fednorm.engines.workers import usable_cores
from fednorm.plan import Plan, make_plan
from fednorm.store import Store

sys.path.insert(0, str(Path(__file__).parent))
from machine import describe_machine  # beside this file, shared by all benchmarks

RESULTS = Path(__file__).parent / "results"
CLIENTS, BATCH, EXAMPLES, LR = 10, 20, 200, 0.02
PLAIN = ("plain, 1 thread", "plain, all threads")
ROUNDS = 1_000_000  # more than are ever played, so that none is the last, which also scores
QUIET = 0.05
TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100

Round = Callable[[], object]


@dataclass(frozen=True)
class Effort:
    """How many quiet timings of each variant are wanted, and how many minutes to wait for them."""

    turns: int
    minutes: float


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(2048, 10)),
    )


def federation() -> Federation:
    draw = torch.Generator().manual_seed(0)

    def examples() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(EXAMPLES, 3, 32, 32, generator=draw), torch.randint(0, 10, (EXAMPLES,), generator=draw)

    return from_clients([examples() for _ in range(CLIENTS)], examples(), num_classes=10)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def plain(data: Federation, steps: int, count: int) -> Round:
    """The loop everybody writes: load the state, train, add up, divide."""
    model = network().train()
    server = copy.deepcopy(model.state_dict())
    draw = torch.Generator().manual_seed(1)

    def play() -> None:
        nonlocal server
        total: dict[str, torch.Tensor] = {}
        for rows in data.clients:
            model.load_state_dict(server)
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            for _ in range(steps):
                batch = rows[torch.randperm(len(rows), generator=draw)[:BATCH]]
                optimizer.zero_grad()
                functional.cross_entropy(model(data.x[batch]), data.y[batch]).backward()
                optimizer.step()
            for key, value in model.state_dict().items():
                total[key] = total[key] + value if key in total else value.clone()
        server = {key: (value / CLIENTS).to(server[key].dtype) for key, value in total.items()}

    def play_round() -> None:
        with threads(count):
            play()

    return play_round


def plan_of(data: Federation, steps: int, **engine: Any) -> Plan:
    settings = {"rounds": ROUNDS, "train.local_steps": steps, "train.batch_size": BATCH, "train.lr": LR}
    settings |= {"train.momentum": 0.0, "eval.every": ROUNDS, "engine.device": "cpu"}
    config = updated(RunConfig(), {**settings, **{f"engine.{key}": value for key, value in engine.items()}})
    return make_plan(config, model=network(), federation=data)


def ours(data: Federation, steps: int, count: int, **engine: Any) -> Round:
    """A whole round of a run: draw, train, check, merge, commit."""
    course = Run(plan_of(data, steps, **engine), Store()).rounds()

    def play_round() -> None:
        with threads(count):
            next(course)

    return play_round


def bare(data: Federation, steps: int) -> Round:
    """Our steps alone, one after the other on one thread."""
    plan = plan_of(data, steps)
    phase = plan.method.stages[0][0]
    step = phase.step(step_spec(plan, phase, False))
    numbers = plan.numbers(phase, 1)

    def laid_out(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor

    start = {key: laid_out(value) for key, value in start_state(plan, plan.schema(phase), plan.initial(), {}).items()}
    key = plan.batches.batch(0, 0)[2]

    def play_round() -> None:
        with threads(1), training_mode(plan.prepared.model, phase.rule.hold):
            for client in range(CLIENTS):
                trees = to_trees(plan, phase, Job(client, start, 0, steps).start)
                params, rest, buffers = trees.params, trees.rest, trees.buffers
                for k in range(steps):
                    rows = data.clients[client][k * BATCH % EXAMPLES :][:BATCH]
                    x, y = laid_out(data.x[rows]), data.y[rows]
                    out = step(params, rest, buffers, trees.params, x, y, key, numbers)
                    params, rest, buffers = out.params, out.rest, out.buffers

    return play_round


@dataclass(frozen=True)
class Timing:
    """Seconds of a round, and which share of the cores other programs took meanwhile."""

    seconds: float
    foreign: float

    @property
    def quiet(self) -> bool:
        return self.foreign < QUIET


def foreign_seconds() -> float:
    """CPU seconds that others than this program and its workers have used; 0 where the system does not tell."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, stat.read_text().split()[1:9])
    own = time.process_time()
    for child in multiprocessing.active_children():
        own += sum(map(int, Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[11:13])) / TICKS
    return (user + nice + system + irq + softirq + steal) / TICKS - own


def timed(play: Round, cores: int) -> Timing:
    """One timing of as many rounds as take half a second, since the system counts in hundredths of one."""
    before, started, rounds = foreign_seconds(), time.perf_counter(), 0
    while rounds == 0 or time.perf_counter() - started < 0.5:
        play()
        rounds += 1
    seconds = time.perf_counter() - started
    return Timing(seconds / rounds, (foreign_seconds() - before) / (cores * seconds))


def wait_for_quiet(cores: int, deadline: float) -> None:
    while timed(lambda: time.sleep(0.3), cores).foreign > QUIET and time.perf_counter() < deadline:
        pass


def race(variants: dict[str, Round], effort: Effort, cores: int) -> dict[str, list[Timing]]:
    """Timings of every variant, until each has enough quiet ones or patience ends."""
    for play in variants.values():
        play()
        play()
    times: dict[str, list[Timing]] = {name: [] for name in variants}
    order = list(variants)
    draw = random.Random(0)  # noqa: S311
    deadline = time.perf_counter() + 60 * effort.minutes
    while lacking := [name for name in order if sum(t.quiet for t in times[name]) < effort.turns]:
        if time.perf_counter() > deadline and all(len(own) >= effort.turns for own in times.values()):
            break
        draw.shuffle(lacking)
        for name in lacking:
            wait_for_quiet(cores, deadline)
            times[name].append(timed(variants[name], cores))
    return times


def summary(times: dict[str, list[Timing]]) -> dict[str, Any]:
    """Best and median seconds of the quiet timings (of all, where fewer than three are), and ratios of medians."""
    kept = {}
    for name, own in times.items():
        quiet = [t.seconds for t in own if t.quiet]
        kept[name] = quiet if len(quiet) >= 3 else [t.seconds for t in own]
    reference = min(statistics.median(kept[name]) for name in PLAIN)
    return {
        name: {
            "best": round(min(own), 5),
            "median": round(statistics.median(own), 5),
            "ratio": round(statistics.median(own) / reference, 3),
            "quiet": sum(t.quiet for t in times[name]),
            "timings": len(times[name]),
        }
        for name, own in kept.items()
    }


def measure(steps: int, effort: Effort, cores: int) -> dict[str, Any]:
    data = federation()
    variants: dict[str, Round] = {
        PLAIN[0]: plain(data, steps, 1),
        PLAIN[1]: plain(data, steps, cores),
        "bare, 1 thread": bare(data, steps),
        "sequential, 1 thread": ours(data, steps, 1, name="sequential"),
        "sequential, all threads": ours(data, steps, cores, name="sequential"),
        "stacked, all threads": ours(data, steps, cores, name="stacked"),
        f"workers, {cores} processes": ours(data, steps, 1, name="workers"),
    }
    found = summary(race(variants, effort, cores))
    whole, steps_alone = found["sequential, 1 thread"], found["bare, 1 thread"]
    overhead = {key: round(1e3 * (whole[key] - steps_alone[key]), 2) for key in ("best", "median")}
    return {"local_steps": steps, "variants": found, "overhead_ms": overhead}


def table(result: dict[str, Any]) -> str:
    """A result as a Markdown table."""
    columns = result["results"]
    lines = [
        ["seconds a round: best / median (ratio to the better plain loop)", *(f"E={c['local_steps']}" for c in columns)]
    ]
    lines.append(["---"] * len(lines[0]))
    for name in columns[0]["variants"]:
        cells = [column["variants"][name] for column in columns]
        lines.append(
            [
                name,
                *(
                    f"{c['best']:.4f} / {c['median']:.4f} ({c['ratio']:.2f}){'' if c['quiet'] >= 3 else '*'}"
                    for c in cells
                ),
            ]
        )
    costs = [f"{column['overhead_ms']['best']} / {column['overhead_ms']['median']} ms" for column in columns]
    lines.append(["sequential less bare", *costs])
    note = "\n* fewer than three quiet timings: other programs slowed this down"
    busy = any(cell["quiet"] < 3 for column in columns for cell in column["variants"].values())
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + (note if busy else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", nargs="+", type=int, default=[1, 10], help="local steps E of a round")
    parser.add_argument("--turns", type=int, default=10, help="quiet timings of each variant")
    parser.add_argument("--minutes", type=float, default=5, help="how long to wait for them, for each E")
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu_round.json")
    parser.add_argument("--table", type=Path, metavar="JSON", help="measure nothing, print the table of a result")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(arguments.table.read_text())))
        return
    cores, effort = usable_cores(), Effort(arguments.turns, arguments.minutes)
    torch.set_num_threads(cores)
    result = {
        "benchmark": "cpu_round",
        **describe_machine(torch.device("cpu")),
        "settings": {"clients": CLIENTS, "batch": BATCH, "examples": EXAMPLES, "lr": LR, "dtype": "float32"},
        "effort": asdict(effort),
        "results": [measure(steps, effort, cores) for steps in arguments.steps],
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))


if __name__ == "__main__":
    main()
