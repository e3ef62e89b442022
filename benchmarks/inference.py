"""What a norm costs at inference: forward passes of the same network with each norm, relative to folded BatchNorm.

    python benchmarks/inference.py --threads 1
    python benchmarks/inference.py --device cuda --batch 64
    python benchmarks/inference.py --table benchmarks/results/inference_cpu.json

All variants are timed in turn, again and again in another order, and compared within a turn, so that whatever else the
machine does meanwhile meets all of them alike. With one CPU thread the clock is the process's CPU time. Writes
benchmarks/results/inference_DEVICE.json and prints its table.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fednorm import models
from fednorm.bench.machine import describe_machine
from fednorm.engines.machine import find_device
from fednorm.errors import ConfigError
from fednorm.files import write_json
from fednorm.halves.prepared import prepare
from fednorm.methods import parse
from fednorm.pieces.fold import fold

RESULTS = Path(__file__).parent / "results"
REFERENCE = "BN folded"


@dataclass(frozen=True)
class Variant:
    """A norm under test: the method that brings it in, and whether the network is folded for inference."""

    name: str
    method: str
    folded: bool = False


@dataclass(frozen=True)
class Effort:
    """How long to measure one model at one batch size: at least so many turns, and at least so many seconds."""

    turns: int
    seconds: float
    timing: float
    """seconds of a single timing, at least"""


VARIANTS = (
    Variant(REFERENCE, "fedavg", folded=True),
    Variant("BN", "fedavg"),
    Variant("GN", "gn"),
    Variant("LN", "ln"),
    Variant("IN", "in"),
    Variant("WS+GN", "ws+gn"),
    Variant("WS+GN folded", "ws+gn", folded=True),
    Variant("FedWon", "fedwon"),
    Variant("FedWon folded", "fedwon", folded=True),
    Variant("FixUp", "fixup"),
)


def network(model: str, variant: Variant, device: torch.device) -> nn.Module:
    """The network of a variant, its statistics moved by one training pass, checked against its unfolded form."""
    net = prepare(models.build(model), parse(variant.method), name=f"model '{model}'").model
    torch.manual_seed(0)
    x = torch.randn(16, 3, 32, 32)
    with torch.no_grad():
        net.train()(x)
        net.eval()
        folded = fold(net) if variant.folded else net
        gap = (folded(x) - net(x)).abs().max() / net(x).abs().max().clamp_min(1e-30)
    if not gap <= 1e-4:
        raise AssertionError(f"{model}, {variant.name}: folding changed the outputs by {gap:.1e} of their size")
    return folded.to(device)


Clock = Callable[[], float]


def clock_for(device: torch.device) -> tuple[str, Clock]:
    """CPU time where one thread does all the work: it stands still while others have the core. Else the wall's."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return ("cpu", time.process_time) if alone else ("wall", time.perf_counter)


def seconds(net: nn.Module, x: torch.Tensor, calls: int, clock: Clock) -> float:
    """Seconds of one forward pass, over some calls; short ones find weights and code in the caches."""
    if calls > 1:
        net(x)
    _wait(x)
    started = clock()
    for _ in range(calls):
        net(x)
    _wait(x)
    return (clock() - started) / calls


def _wait(x: torch.Tensor) -> None:
    if x.device.type == "cuda":
        torch.cuda.synchronize()


@torch.inference_mode()
def race(nets: dict[str, nn.Module], x: torch.Tensor, effort: Effort, clock: Clock) -> dict[str, list[float]]:
    """Times of every network in every turn. Each turn has its own order; the number of calls is the same for all."""
    calls = max(1, round(effort.timing / min(seconds(nets[REFERENCE], x, 1, clock) for _ in range(5))))
    times: dict[str, list[float]] = {name: [] for name in nets}
    order = list(nets)
    draw = random.Random(0)  # noqa: S311
    started = time.perf_counter()
    while len(times[REFERENCE]) < effort.turns or time.perf_counter() - started < effort.seconds:
        draw.shuffle(order)
        for name in order:
            times[name].append(seconds(nets[name], x, calls, clock))
    return times


def summary(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Medians over the turns, of the time and of its ratio to the reference of the same turn, with quartiles."""
    lines = {}
    for name, own in times.items():
        ratios = [mine / theirs for mine, theirs in zip(own, times[REFERENCE], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        found = {"ms": 1e3 * statistics.median(own), "ratio": middle, "ratio_q1": low, "ratio_q3": high}
        lines[name] = {key: round(value, 4) for key, value in found.items()}
    return lines


def measure(model: str, batch: int, device: torch.device, effort: Effort, clock: Clock) -> dict[str, Any]:
    """All variants of a model at one batch size."""
    nets: dict[str, nn.Module] = {}
    refused = {}
    for variant in VARIANTS:
        try:
            nets[variant.name] = network(model, variant, device)
        except ConfigError as reason:
            refused[variant.name] = str(reason)
    x = torch.randn(batch, 3, 32, 32, device=device)
    times = race(nets, x, effort, clock)
    turns = len(times[REFERENCE])
    return {"model": model, "batch": batch, "turns": turns, "variants": summary(times), "refused": refused}


def table(result: dict[str, Any]) -> str:
    """A result as a Markdown table: median ratio and quartiles, and the milliseconds of the reference."""
    columns = result["results"]
    header = ["norm", *(f"{each['model']}, batch {each['batch']}" for each in columns)]
    lines = [header, ["---"] * len(header)]
    for variant in VARIANTS:
        cells = [each["variants"].get(variant.name) for each in columns]
        shown = [
            f"{cell['ratio']:.2f} ({cell['ratio_q1']:.2f}-{cell['ratio_q3']:.2f})" if cell else "-" for cell in cells
        ]
        if variant.name == REFERENCE:
            shown = [f"1 ({cell['ms']:.1f} ms)" for cell in cells if cell]
        lines.append([variant.name, *shown])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet20", "mobilenet_v2"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's choice")
    parser.add_argument("--turns", type=int, default=9, help="turns of each model and batch size, at least")
    parser.add_argument("--seconds", type=float, default=75, help="seconds for each of them, at least")
    parser.add_argument("--timing", type=float, default=0.03, help="seconds of one timing, at least")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/inference_DEVICE.json")
    parser.add_argument("--table", type=Path, metavar="JSON", help="measure nothing, print the table of a result")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(arguments.table.read_text())))
        return
    device = find_device(arguments.device)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    clock_name, clock = clock_for(device)
    effort = Effort(arguments.turns, arguments.seconds, arguments.timing)
    result = {
        "benchmark": "inference",
        **describe_machine(device),
        "settings": {**asdict(effort), "clock": clock_name, "image": [3, 32, 32], "dtype": "float32"},
        "reference": REFERENCE,
        "results": [
            measure(model, batch, device, effort, clock) for model in arguments.models for batch in arguments.batch
        ],
    }
    out = arguments.out or RESULTS / f"inference_{device.type}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, result, indent=1)
    print(table(result))


if __name__ == "__main__":
    main()
