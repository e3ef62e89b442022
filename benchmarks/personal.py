"""What it costs to test clients' own models: one by one, and as stacks.

    python benchmarks/personal.py

FedBN clients after one round, each with 10 to 50 test images of its own. On a CPU it is CPU time, since cores may have
other work; the two take turns, and medians are shown. Beside it the operators that torch is asked for, most of them a
launch on a GPU. Writes benchmarks/results/personal_DEVICE.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fednorm.bench.machine import describe_machine
from fednorm.data.given import from_clients
from fednorm.engines.machine import find_device
from fednorm.engines.stack.scores import StackScorer
from fednorm.files import write_json
from fednorm.running.config import RunConfig, updated
from fednorm.running.evaluate import client_model, client_states, global_model
from fednorm.running.plan import make_plan
from fednorm.running.run import Run
from fednorm.running.store import Store


class Operators(TorchDispatchMode):
    """Counts what torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def played(model: str, clients: int, device: torch.device) -> Run:
    """A run of FedBN after its one round, whose clients have 10 to 50 test images."""
    draw = torch.Generator().manual_seed(0)
    sizes = torch.randint(10, 51, (clients,), generator=draw).tolist()
    images = [[torch.randn(size, 1, 28, 28, generator=draw) for size in some] for some in ([8] * clients, sizes)]
    labelled = [[(x, torch.randint(0, 10, (len(x),), generator=draw)) for x in some] for some in images]
    changes = {"method": "fedbn", "model": model, "rounds": 1, "train.local_steps": 1, "train.batch_size": 4}
    changes |= {"engine.name": "stacked", "engine.device": str(device), "eval.every": 1}
    plan = make_plan(updated(RunConfig(), changes), federation=from_clients(*labelled, num_classes=10))
    run = Run(plan, Store())
    list(run.rounds())
    return run


def variants(run: Run) -> dict[str, Callable[[], object]]:
    plan, server, store = run.plan, run.server.tree, run.store
    phase, own = plan.evaluated(-1), dict(enumerate(plan.federation.own_test))
    newcomer, stack = global_model(plan, phase, server, store), StackScorer(plan)

    def one_by_one() -> object:
        states = {client: client_model(plan, phase, server, store, client, newcomer) for client in own}
        return [plan.scorer.rows(states[client], plan.federation.tests, rows) for client, rows in own.items()]

    def stacked() -> object:
        states = client_states(phase, server, store, newcomer, plan.device)
        return stack.each(states, plan.federation.tests, own)

    return {"one by one": one_by_one, "stacked": stacked}


def measured(run: Run, turns: int, clock: Callable[[], float]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    plays = variants(run)
    for name, play in plays.items():
        play()  # what is set up once
        with Operators() as asked:
            play()
        found[name] = {"operators": asked.count, "ms": []}
    for _ in range(turns):
        for name, play in plays.items():
            started = clock()
            play()
            found[name]["ms"].append(1e3 * (clock() - started))
    for each in found.values():
        each["ms"] = round(statistics.median(each["ms"]), 2)
    ratio = {name: round(found["stacked"][name] / found["one by one"][name], 3) for name in ("ms", "operators")}
    return {**found, "ratio.stacked/one_by_one": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mlp_bn", "small_resnet", "resnet20"])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/personal_DEVICE.json")
    options = parser.parse_args()
    device = find_device(options.device)
    torch.set_num_threads(1)
    result: dict[str, Any] = {"benchmark": "personal", **describe_machine(device), "clients": options.clients}
    result |= {"turns": options.turns, "models": {}}
    for model in options.models:
        clock = time.process_time if device.type == "cpu" else time.perf_counter
        found = result["models"][model] = measured(played(model, options.clients, device), options.turns, clock)
        print(model, found, flush=True)
    out = options.out or Path(__file__).parent / "results" / f"personal_{device.type}.json"
    write_json(out, result, indent=1)
    print(out)


if __name__ == "__main__":
    main()
