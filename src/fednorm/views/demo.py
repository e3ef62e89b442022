"""The demo: what label skew does to batch norm, and what repairs it, on real images in a few minutes on two cores."""

from __future__ import annotations

from pathlib import Path

from fednorm.running.comparison import compare
from fednorm.running.config import RunConfig, updated
from fednorm.running.records import OnRow
from fednorm.running.results import Result

METHODS = ("centralized", "standalone", "fedavg", "fedavg+gn", "fixbn", "fedbn")
SEEDS = (0, 1)
HEADLINE = "fashion_mnist_small (embedded) · 5 clients, 2 classes each · small_resnet · 2 seeds"


def demo_config() -> RunConfig:
    """Forty rounds of ten steps, as in FixBN's set-up for label skew, on a smaller model and set."""
    return updated(
        RunConfig(),
        {
            "data.partition": "shards",
            "data.clients": 5,
            "rounds": 40,
            "train.local_steps": 10,
            "train.batch_size": 20,
            "train.lr": 0.05,
            "train.momentum": 0.9,
            "train.schedule": "step",
        },
    )


def play_demo(out: str | Path, *, jobs: int = 2, on_row: OnRow | None = None) -> Result:
    """Run the demo's comparison into a folder."""
    return compare(METHODS, config=demo_config(), seeds=SEEDS, out=out, jobs=jobs, on_row=on_row)
