"""A round of local steps on one GPU: the plain loop everybody writes, our engines, and a centralized step.

All in one run, as ratios: `python benchmarks/gpu_step.py --clients 5 20 100`. The plain loop trains one client after
the other with torch.optim on batches that lie ready on the GPU; our engines also gather and augment theirs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from machine import describe_machine
from torch import nn
from torch.nn import functional

from fednorm.config import RunConfig, updated
from fednorm.data.federation import Federation
from fednorm.engines.rounds import Run
from fednorm.models import build
from fednorm.plan import make_plan
from fednorm.store import Store

BATCH, STEPS = 20, 50


def synthetic(clients: int) -> Federation:
    """CIFAR-sized random images: speed does not depend on what they show."""
    size = BATCH * STEPS
    x = torch.randint(0, 256, (clients * size, 3, 32, 32), dtype=torch.uint8)
    y = torch.randint(0, 10, (clients * size,))
    rows = torch.arange(clients * size)
    return Federation(
        name="random", x=x, y=y, clients=tuple(rows.split(size)), test_x=x[:10], test_y=y[:10],
        own_test=tuple(torch.arange(10) for _ in range(clients)), num_classes=10, mean=(0.5,) * 3, std=(0.25,) * 3,
    )  # fmt: skip


def engine_ms(clients: int, engine: str, precision: str, augment: str) -> float:
    """Milliseconds of one step of all clients, inside a round, without evaluation and checkpoint."""
    settings = {
        "model": "resnet20", "rounds": 4, "train.local_steps": STEPS, "train.batch_size": BATCH, "train.lr": 0.001,
        "train.weight_decay": 1e-4, "train.augment": augment, "engine.device": "cuda", "engine.name": engine,
        "engine.precision": precision, "eval.every": 1000, "engine.checkpoint_every": 1000,
    }  # fmt: skip
    course = Run(make_plan(updated(RunConfig(), settings), federation=synthetic(clients)), Store())
    rows = []
    for row in course.rounds():
        rows.append(row["seconds"])
        if len(rows) == 3:  # the fourth round would evaluate
            break
    return min(rows[1:]) / STEPS * 1e3


def plain_ms(clients: int, precision: str, union: bool, compiled: bool = False) -> float:
    """A step of plain PyTorch: client by client, or one centralized step on the union of their batches."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "fp32"
    torch.backends.cudnn.benchmark = True
    model: nn.Module = build("resnet20").cuda()
    size = BATCH * clients if union else BATCH
    x, y = torch.randn(size, 3, 32, 32, device="cuda"), torch.randint(0, 10, (size,), device="cuda")
    if union:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, weight_decay=1e-4)
    net = torch.compile(model) if compiled else model

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            loss = functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    run: Callable[[], None] = step
    if union:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    times = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / 20 * 1e3)
    return min(times) * (1 if union else clients)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[5, 20, 100])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu_step.json"))
    args = parser.parse_args()
    results = {}
    for clients in args.clients:
        found: dict[str, float] = {}

        def note(name: str, value: float, clients: int = clients, found: dict[str, float] = found) -> None:
            found[name] = value
            print(f"{clients:4} clients  {name:36} {value:9.3f} ms", flush=True)

        for precision in ("fp32", "tf32", "bf16"):
            note(f"stacked {precision}", engine_ms(clients, "stacked", precision, "crop(2)+flip"))
        for precision in ("fp32", "tf32", "bf16"):
            note(f"plain {precision}", plain_ms(clients, precision, union=False))
        note("centralized bf16 compiled", plain_ms(clients, "bf16", union=True, compiled=True))
        ratios = {f"plain/stacked {p}": found[f"plain {p}"] / found[f"stacked {p}"] for p in ("fp32", "tf32", "bf16")}
        ratios["stacked bf16/centralized compiled"] = found["stacked bf16"] / found["centralized bf16 compiled"]
        results[clients] = {"ms": found, "ratio": ratios}
        print(json.dumps(ratios), flush=True)
    args.out.write_text(json.dumps({**describe_machine(torch.device("cuda")), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
