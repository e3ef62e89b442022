"""How the cost of a round grows: with the clients that take part in it, and with those that do not.

    python benchmarks/scaling/scaling.py                # a GPU where there is one: ResNet20; else a tiny network
    python benchmarks/scaling/scaling.py --population-of benchmarks/scaling/scaling_cpu.json
    python benchmarks/scaling/scaling.py --draw benchmarks/scaling/scaling_cpu.json

Clients: rounds of one step of every client, 1 to 1,000 of them, by engine and for a plain PyTorch loop. Population:
rounds of 100 clients drawn out of 10^2 to 10^6, as in benchmarks/population.py. Writes scaling_DEVICE.json and .png
beside this file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from fednorm.bench import gpu
from fednorm.bench.cases import Case
from fednorm.bench.machine import describe_machine
from fednorm.bench.plain_steps import client_loop
from fednorm.bench.pools import random_images
from fednorm.bench.timing import Play, Rounds, repeated
from fednorm.data.federation import Federation
from fednorm.data.given import from_clients
from fednorm.engines.machine import find_device, threads
from fednorm.files import write_json
from fednorm.running.config import RunConfig, updated
from fednorm.running.plan import make_plan
from fednorm.running.run import Run
from fednorm.running.store import Store

HERE = Path(__file__).parent
CLIENTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
POPULATIONS = (100, 1000, 10_000, 100_000, 1_000_000)
BATCH, FEATURES, WIDTH = 20, 8, 64
LIMIT_SECONDS = 1.5
"""A variant whose round takes longer is not tried with more clients."""


def tiny_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))


def tiny_data(clients: int) -> Federation:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2 * BATCH, FEATURES, generator=draw)
    y = (x[:, 0] > 0).to(torch.int64)
    return from_clients([(x, y)] * clients, (x, y), num_classes=2)


def tiny_engine(clients: int, name: str) -> Play:
    settings = {"rounds": gpu.FOREVER, "eval.every": gpu.FOREVER, "engine.checkpoint_every": gpu.FOREVER}
    settings |= {"train.local_steps": 1, "train.batch_size": BATCH, "train.lr": 0.01, "train.momentum": 0.0}
    settings |= {"engine.name": name, "engine.device": "cpu"}
    plan = make_plan(updated(RunConfig(), settings), model=tiny_network(), federation=tiny_data(clients))
    return Rounds(Run(plan, Store()), plan.device)


def tiny_loop(clients: int) -> Play:
    """The plain loop on the tiny network: load, train, add up, divide."""
    model, data = tiny_network().train(), tiny_data(clients)
    server = {key: value.clone() for key, value in model.state_dict().items()}

    def play() -> None:
        total = {key: torch.zeros_like(value, dtype=torch.float32) for key, value in server.items()}
        for rows in data.clients:
            model.load_state_dict(server)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            optimizer.zero_grad()
            functional.cross_entropy(model(data.x[rows[:BATCH]]), data.y[rows[:BATCH]]).backward()
            optimizer.step()
            for key, value in model.state_dict().items():
                total[key] += value
        server.update({key: (value / clients).to(server[key].dtype) for key, value in total.items()})

    return repeated(play, torch.device("cpu"))


def variants(device: torch.device) -> dict[str, Callable[[int], Play]]:
    if device.type == "cuda":
        return {
            "plain loop, bf16": lambda clients: repeated(
                client_loop(Case("resnet20"), clients, gpu.BATCH, "bf16", device), device
            ),
            "stacked, bf16": lambda clients: gpu.engine(
                "resnet20", random_images(clients, 2 * gpu.BATCH), "stacked", "bf16", 1, device
            ),
        }
    return {
        "plain loop": tiny_loop,
        "sequential": lambda clients: tiny_engine(clients, "sequential"),
        "workers": lambda clients: tiny_engine(clients, "workers"),
        "stacked": lambda clients: tiny_engine(clients, "stacked"),
    }


def by_clients(device: torch.device, seconds: float, repeats: int) -> dict[str, dict[int, list[float]]]:
    """Seconds of a round by variant and number of clients."""
    found: dict[str, dict[int, list[float]]] = {}
    with threads(1 if device.type == "cpu" else torch.get_num_threads()):
        for name, make in variants(device).items():
            found[name] = {}
            for clients in CLIENTS:
                started = time.perf_counter()
                play = make(clients)
                play(seconds)  # compiles, allocates, and lets the engine find its pace
                found[name][clients] = [play(seconds) for _ in range(repeats)]
                took = time.perf_counter() - started
                median = statistics.median(found[name][clients])
                print(f"{name:18} {clients:5} clients {1e3 * median:10.3f} ms a round  ({took:.1f} s)", flush=True)
                if median > LIMIT_SECONDS:
                    break
    return found


def by_population(rounds: int) -> list[dict[str, Any]]:
    """Runs of benchmarks/population.py, each in a process of its own."""
    found = []
    for population in POPULATIONS:
        command = [sys.executable, str(HERE.parent / "population.py"), "--one", "--population", str(population)]
        done = subprocess.run([*command, "--rounds", str(rounds)], stdout=subprocess.PIPE, text=True, check=True)
        found.append(json.loads(done.stdout))
        print(f"population {population:8} {1e3 * found[-1]['seconds_a_round_median']:8.2f} ms a round", flush=True)
    return found


def draw(result: dict[str, Any], path: Path) -> None:
    """Two panels: what grows with the cohort, and what does not grow with the population."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, points in result["by_clients"].items():
        sizes = [int(clients) for clients in points]
        left.plot(sizes, [1e3 * statistics.median(each) for each in points.values()], marker="o", label=name)
    left.set(xscale="log", yscale="log", xlabel="clients in a round", ylabel="ms a round")
    left.set_title(f"{result['model']}, one step of every client")
    left.legend(frameon=False)
    sizes = [each["population"] for each in result["by_population"]]
    near = {"textcoords": "offset points"}
    right.plot(sizes, [1e3 * each["seconds_a_round_median"] for each in result["by_population"]], marker="o")
    right.set(xscale="log", xlabel="population", ylabel="ms a round (median)", ylim=(0, None))
    right.set_title("FedBN, 100 clients a round, tiny network, CPU")
    right.annotate("time", (sizes[0], 1e3 * result["by_population"][0]["seconds_a_round_median"]), (4, -14), **near)
    memory = right.twinx()
    memory.annotate("memory", (sizes[0], result["by_population"][0]["rss_bytes"] / 2**20), (4, -14), **near)
    memory.plot(sizes, [each["rss_bytes"] / 2**20 for each in result["by_population"]], marker="s", color="tab:gray")
    memory.set(ylabel="peak memory, MiB", ylim=(0, None))
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=0.2, help="of one timing, at least")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=30, help="of each population's run")
    parser.add_argument(
        "--population-of", type=Path, metavar="JSON", help="take that part from a result; it needs no GPU"
    )
    parser.add_argument("--out", type=Path, default=HERE, help="folder for the two files")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="measure nothing, draw a result again")
    arguments = parser.parse_args()
    if arguments.draw:
        draw(json.loads(arguments.draw.read_text()), arguments.draw.with_suffix(".png"))
        return
    device = find_device(arguments.device)
    facts = describe_machine(device, ["python", "benchmarks/scaling/scaling.py", *sys.argv[1:]])
    result: dict[str, Any] = {"benchmark": "scaling", **facts}
    result["model"] = "ResNet20, batch 20, bf16" if device.type == "cuda" else "tiny BN network, batch 20"
    result["by_clients"] = by_clients(device, arguments.seconds, arguments.repeats)
    stored = arguments.population_of
    result["by_population"] = (
        json.loads(stored.read_text())["by_population"] if stored else by_population(arguments.rounds)
    )
    path = arguments.out / f"scaling_{device.type}.json"
    write_json(path, result, indent=1)
    draw(result, path.with_suffix(".png"))
    print(path)


if __name__ == "__main__":
    main()
