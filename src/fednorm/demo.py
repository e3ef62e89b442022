"""The demo: what label skew does to batch norm, and what repairs it, on real images in a few minutes on two cores."""

from __future__ import annotations

from pathlib import Path

from fednorm.compare import OnEvent, compare
from fednorm.config import RunConfig, updated
from fednorm.results import Result, cell_text

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


def play_demo(out: str | Path, *, jobs: int = 2, on_event: OnEvent | None = None) -> Result:
    """Run the demo's comparison into a folder."""
    return compare(METHODS, config=demo_config(), seeds=SEEDS, out=out, jobs=jobs, on_event=on_event)


def what_was_seen(result: Result) -> str:
    """One sentence from the numbers: the best and the worst federated method on the pooled test, and the way to go."""
    lines = {line["method"]: line for line in result.table()}
    federated = [line for line in lines.values() if line["bytes_per_round"]]
    ranked = sorted(federated, key=lambda line: line["pooled"]["mean"])
    worst, best = ranked[0], ranked[-1]
    text = (
        f"On the pooled test {best['method']} ({cell_text(best['pooled'])}) was the best federated method and "
        f"{worst['method']} ({cell_text(worst['pooled'])}) the worst"
    )
    if "centralized" not in lines:
        return f"{text}."
    central = lines["centralized"]["pooled"]
    gaps = [central["mean"] - line["pooled"]["mean"] for line in (best, worst)]
    return (
        f"{text}; centralized training reached {cell_text(central)}, "
        f"{gaps[0]:.1f} points above the one and {gaps[1]:.1f} above the other."
    )
