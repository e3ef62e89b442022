"""What a population costs: memory, time and disk of runs in which few of very many clients take part.

`python benchmarks/population.py` plays FedBN with 100 clients a round out of 10^2 to 10^6, each in a process of its
own, then 1,000 rounds out of 10^6, and writes benchmarks/results/population.json. Clients have 8 examples each; the
model is Linear(8, width), BatchNorm1d(width), Linear(width, 2). Sampling is timed by itself.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fednorm.bench.machine import describe_machine
from fednorm.core.state import tree_bytes
from fednorm.data.client_rows import ClientRows
from fednorm.data.federation import Federation
from fednorm.files import write_json
from fednorm.halves.server import Server
from fednorm.running.config import RunConfig, updated
from fednorm.running.plan import Plan, make_plan
from fednorm.running.run import Run
from fednorm.running.store import Store

RESULTS = Path(__file__).parent / "results"
EXAMPLES, FEATURES, TESTS = 8, 8, 4000
STEPS_BYTES = 8
"""A client also keeps how many batches it has used."""


def federation(population: int) -> Federation:
    """Clients with examples of their own, around a centre of their own; the label is the sign of the first feature."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(population, EXAMPLES, FEATURES, generator=generator)
    y = (x[:, :, 0] > 0).to(torch.int64).reshape(-1)
    x += torch.randn(population, 1, FEATURES, generator=generator)
    test_x = torch.randn(TESTS, FEATURES, generator=generator)
    starts = torch.arange(population) * EXAMPLES
    own = torch.arange(population) * 4 % TESTS
    return Federation(
        name=f"{population} clients",
        x=x.reshape(-1, FEATURES),
        y=y,
        clients=ClientRows(starts, starts + EXAMPLES),
        test_x=test_x,
        test_y=(test_x[:, 0] > 0).to(torch.int64),
        own_test=ClientRows(own, own + 4),
        num_classes=2,
    )


def plan_for(arguments: argparse.Namespace) -> Plan:
    torch.manual_seed(0)
    width = arguments.width
    model = nn.Sequential(nn.Linear(FEATURES, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2))
    config = updated(
        RunConfig(),
        {
            "method": "fedbn",
            "rounds": arguments.rounds,
            "clients_per_round": arguments.cohort,
            "train.local_steps": arguments.steps,
            "train.batch_size": 4,
            "eval.every": 50,
            "engine.name": arguments.engine,
            "engine.device": "cpu",
        },
    )
    return make_plan(config, model=model, federation=federation(arguments.population))


def sampling_seconds(server: Server) -> float:
    """Seconds to draw a cohort, median of rounds that are not played."""
    times, phase = [], server.agreed.phases[0]
    for number in range(1, 201):
        started = time.perf_counter()
        server.cohort(-number, phase)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def play(arguments: argparse.Namespace) -> dict[str, Any]:
    """One run, measured from inside its process."""
    started = time.perf_counter()
    plan = plan_for(arguments)
    ready = time.perf_counter() - started
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.sqlite"
        store = Store(path)
        run = Run(plan, store)
        before = peak_bytes()
        started = time.perf_counter()
        seconds, largest = [], 0
        for row in run.rounds():
            seconds.append(row["seconds"])
            largest = max(largest, sum(each.stat().st_size for each in path.parent.iterdir()))
        total = time.perf_counter() - started
        last = list(store.rows())[-1]
        seen = store.seen()
        state = len(seen) * (tree_bytes(store.get(seen[0]).tree) + STEPS_BYTES)
        store.close()
        disk = path.stat().st_size
    return {
        "population": arguments.population,
        "cohort": plan.cohort_size,
        "rounds": plan.config.rounds,
        "width": arguments.width,
        "engine": run.engine_name,
        "seconds_to_start": ready,
        "seconds_a_round": total / plan.config.rounds,
        "seconds_a_round_median": statistics.median(seconds),
        "seconds_to_sample": sampling_seconds(run.server),
        "rss_bytes": peak_bytes(),
        "rss_bytes_before_round_1": before,
        "data_bytes": plan.federation.x.nbytes + plan.federation.y.nbytes,
        "clients_seen": len(seen),
        "state_bytes": state,
        "disk_bytes": disk,
        "disk_bytes_while_running": largest,
        "disk/state": disk / state,
        "accuracy": last["eval"]["own_client"]["accuracy"],
    }


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(arguments: argparse.Namespace, **changes: Any) -> dict[str, Any]:
    """A run in a fresh process, whose memory is then its own."""
    chosen = {**vars(arguments), **changes}
    names = ("population", "cohort", "rounds", "steps", "width", "engine", "threads")
    flags = [text for name in names for text in (f"--{name}", str(chosen[name]))]
    done = subprocess.run([sys.executable, __file__, "--one", *flags], stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout)
    print(line(result), flush=True)
    return result


HEADER = (
    "population | cohort | rounds | width | s/round | median | sampling ms | RSS MiB |   seen | state MiB | disk MiB"
    " | disk/state"
)


def line(result: dict[str, Any]) -> str:
    mib = 2**20
    cells = [
        f"{result['population']:>10}",
        f"{result['cohort']:>6}",
        f"{result['rounds']:>6}",
        f"{result['width']:>5}",
        f"{result['seconds_a_round']:>7.3f}",
        f"{result['seconds_a_round_median']:>6.3f}",
        f"{1e3 * result['seconds_to_sample']:>11.3f}",
        f"{result['rss_bytes'] / mib:>7.0f}",
        f"{result['clients_seen']:>6}",
        f"{result['state_bytes'] / mib:>9.1f}",
        f"{result['disk_bytes'] / mib:>8.1f}",
        f"{result['disk/state']:>10.3f}",
    ]
    return " | ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--population", type=int, default=1_000_000)
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=1000, help="of the last, full run")
    parser.add_argument("--short", type=int, default=30, help="rounds of the runs over populations")
    parser.add_argument("--steps", type=int, default=2, help="local steps of batch 4")
    parser.add_argument("--width", type=int, default=64, help="channels of the BatchNorm; 64: 1 kB of state a client")
    parser.add_argument("--engine", default="stacked")
    parser.add_argument("--threads", type=int, default=1, help="tensors are tiny; 0: torch's choice")
    parser.add_argument("--one", action="store_true", help="play one run and print its measurements as JSON")
    parser.add_argument("--out", type=Path, default=RESULTS / "population.json")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.one:
        print(json.dumps(play(arguments)))
        return
    print(HEADER)
    sizes = [size for size in (100, 1000, 10_000, 100_000, 1_000_000) if size <= arguments.population]
    growth = [measure(arguments, population=size, rounds=arguments.short) for size in sizes]
    # 0.3, 8 and 75 kB of state: a toy, a small CNN and a ResNet-18, in a file of their own each.
    states = [measure(arguments, width=width, rounds=5 * arguments.short) for width in (16, 512, 4800)]
    target = measure(arguments)
    result = {"benchmark": "population", **describe_machine(torch.device("cpu"))}
    result |= {"target": target, "by_population": growth, "by_state": states}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(arguments.out, result, indent=1)


if __name__ == "__main__":
    main()
