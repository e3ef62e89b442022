"""Submit a run of some rounds to a proof of concept and wait for its end: its status and folder on the last line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from poc import SITES, Poc

from fednorm.nvflare import Recipe
from fednorm.nvflare.watch import SILENCE


def recipe(run_id: str, rounds: int) -> Recipe:
    """A run whose rounds take seconds, so that there is a middle to be killed in."""
    return Recipe(
        method="fedbn",
        model="fedbs_mnist_cnn",
        data={"name": "fashion_mnist_small", "train_limit": 400},
        num_rounds=rounds,
        min_clients=len(SITES),
        local_epochs=8,
        lr=0.02,
        run_id=run_id,
    )


def main(folder: str, run_id: str, rounds: int, silence: float) -> None:
    job = recipe(run_id, rounds)
    job.add_server_config({SILENCE: silence})
    status, result = Poc(Path(folder)).submit(job)
    print(json.dumps([status, str(result)]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
