"""On a GPU: does every built-in model, played twice for three rounds, have the same bits? Run as a script.

    python tests/gpu_same_bits.py [--precision bf16] [--models resnet20,vit_tiny] [--engine stacked] [--strict]

It prints a line for each model: equal, or the first tensor that differs, by how much, and the losses of both runs.
With `--strict` libraries may only use what they call deterministic; a model that differs without and not with it has
an operator that adds in any order.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

sys.path.insert(0, str(Path(__file__).parent))

import tiny
from fednorm.data.federation import Federation
from fednorm.errors import FednormError, first_line
from fednorm.models import MODELS, build, list_models
from fednorm.running.run import Run
from fednorm.running.store import Store


def federation(channels: int, size: int) -> Federation:
    """Four clients with images of bytes."""
    draw = torch.Generator().manual_seed(0)
    data = tiny.federation((40, 40, 40, 40))
    x, test = (
        torch.randint(0, 256, (len(part), channels, size, size), generator=draw, dtype=torch.uint8)
        for part in (data.x, data.test_x)
    )
    return replace(data, x=x, test_x=test, mean=(0.5,) * channels, std=(0.25,) * channels)


def play(name: str, precision: str, chosen: argparse.Namespace) -> Run:
    model = build(name, num_classes=tiny.NUM_CLASSES, in_channels=3, seed=0)
    changes = {"rounds": 3, "train__local_steps": 3, "train__batch_size": 10, "train__lr": 0.01}
    changes |= {"train__dtype": "float32", "train__augment": "crop(2)+flip", "eval__every": 3}
    changes |= {"engine__device": chosen.device, "engine__precision": precision, "engine__name": chosen.engine}
    run = Run(tiny.plan(model=model, data=federation(3, MODELS[name].image_size), **changes), Store())
    list(run.rounds())
    return run


def verdict(name: str, precision: str, chosen: argparse.Namespace) -> str:
    try:
        left, right = (play(name, precision, chosen) for _ in range(2))
    except (FednormError, RuntimeError, ValueError) as error:
        return f"not played: {first_line(error)}"
    losses = [[row["train_loss"] for row in run.store.rows()] for run in (left, right)]
    for key, value in left.server.tree.items():
        other = right.server.tree[key]
        if not torch.equal(value, other):
            away = float((value.double() - other.double()).abs().max())
            return f"UNEQUAL from '{key}' on, by {away:.2g}; losses {losses[0]} and {losses[1]}"
    return "equal" if losses[0] == losses[1] else f"UNEQUAL losses {losses[0]} and {losses[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="fp32,tf32,bf16")
    parser.add_argument("--models", default=",".join(list_models()))
    parser.add_argument("--engine", default="stacked")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--strict", action="store_true")
    chosen = parser.parse_args()
    if chosen.strict:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.deterministic = True
    for name in chosen.models.split(","):
        for precision in chosen.precision.split(","):
            print(f"{name:<20}{precision:<6}{verdict(name, precision, chosen)}", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
