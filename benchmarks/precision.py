"""What narrow numbers cost in accuracy: the same runs in every precision, over seeds.

    python benchmarks/precision.py --data-dir DIR
    python benchmarks/precision.py --data-dir DIR --precisions tf32,bf16 --seeds 8 --rounds 500

FedAvg of ResNet20 on Fashion-MNIST, 5 clients with two shards of classes each. A precision is fine where its mean over
seeds lies within the spread of float32's. The seeds of a precision share one stack. Needs a GPU: elsewhere everything
is float32. Writes benchmarks/results/precision_cuda.json and prints its table.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from fednorm.bench.machine import describe_machine
from fednorm.files import write_json
from fednorm.running.comparison import compare
from fednorm.running.config import RunConfig, updated
from fednorm.running.results import spread

SETTINGS: dict[str, Any] = {
    "model": "resnet20",
    "data.name": "fashion_mnist",
    "data.clients": 5,
    "train.local_steps": 5,
    "train.batch_size": 20,
    "train.lr": 0.05,
    "train.momentum": 0.9,
    "train.schedule": "step",
    "eval.chunk": 2000,
    "engine.name": "stacked",
    "engine.device": "cuda",
}


def accuracies(precision: str, rounds: int, seeds: int, data_dir: str | None) -> tuple[list[float], float]:
    """The final accuracy of every seed, and the seconds they took together."""
    settings = {**SETTINGS, "rounds": rounds, "eval.every": rounds, "data.dir": data_dir, "engine.precision": precision}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "runs"
        result = compare(["fedavg"], config=updated(RunConfig(), settings), seeds=range(seeds), out=out)
    finals = [each["final"]["pooled"]["accuracy"] for each in result.runs]
    return finals, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="folder with the data sets; default: FEDNORM_DATA")
    parser.add_argument("--precisions", default="fp32,tf32,bf16", help="which of fp32, tf32 and bf16")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "precision_cuda.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("precisions other than float32 need a CUDA device, and there is none")
    found: dict[str, dict[str, Any]] = {}
    command = ["python", "benchmarks/precision.py", "--precisions", options.precisions]
    command += ["--rounds", str(options.rounds), "--seeds", str(options.seeds)]
    report = describe_machine(torch.device("cuda"), command)
    report |= {"settings": {**SETTINGS, "rounds": options.rounds}, "precisions": found}
    for precision in options.precisions.split(","):
        finals, seconds = accuracies(precision, options.rounds, options.seeds, options.data_dir)
        found[precision] = {"accuracy": finals, "spread": str(spread(finals)), "seconds": round(seconds, 1)}
        print(f"{precision}: {spread(finals)} % ({', '.join(f'{each:.2f}' for each in finals)}), {seconds:.0f} s")
        write_json(options.out, report, indent=1)


if __name__ == "__main__":
    main()
