"""What each rank of a test does: it plays runs into folders below FOLDER, and writes how those that must fail ended.

`torchrun ... ranks_script.py FOLDER`; `test_ranks` plays the same runs in one process.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tiny
from fednorm.core.method import Facts, Method
from fednorm.core.reductions import fold
from fednorm.core.state import Kind, Tree
from fednorm.data.federation import Federation
from fednorm.engines.ranks import SpreadCohort, join
from fednorm.engines.stack import slot
from fednorm.errors import FednormError
from fednorm.methods import parse
from fednorm.pieces.changes import merge_by
from fednorm.running.api import run
from trained_how import count_training

SIZES = (7, 14, 9, 3, 8)
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("fedavg", {"engine__name": "auto"}),
    "sampled": (
        "fedbn",
        {"clients_per_round": 3, "eval__probes": ("grad-norm", "batch-shift", "global-shift", "client-spread")},
    ),
    "one-at-a-time": ("fedbn+local-momentum", {"clients_per_round": 1, "engine__checkpoint_every": 3}),
    "stages": ("fixbn+global-momentum", {"train__local_steps": None, "train__local_epochs": 1}),
    "by-loss": ("fedbs", {}),
    "by-divergence": ("feddna", {}),
    "server-optimizer": ("fedadam+pooled", {}),
    "two-exchanges": ("hbn", {}),
    "all-data-as-one": ("posthoc(mode=cumulative)", {}),
    "without-one": ("fedavg", {"engine__quorum": 0.5}),
}
"""Method and settings by name of the folder."""
STACKED: dict[str, tuple[str, dict[str, Any]]] = {
    "stacked": ("fedavg", {}),
    "stacked-own-state": ("fedbn", {"train__local_steps": None, "train__local_epochs": 1}),
    "stacked-sampled": ("fedbn+local-momentum", {"clients_per_round": 3}),
    "stacked-reported": ("silobn(report=true)", {"eval__probes": ("grad-norm", "client-spread")}),
    "stacked-server-optimizer": ("fedadam", {}),
    "stacked-without-one": ("local-momentum", {"engine__quorum": 0.5}),
}
"""The same of runs whose ranks train by the programs of a GPU, here on the CPU."""


def federation(spoilt: int | None = None, sizes: tuple[int, ...] = SIZES) -> Federation:
    """Five clients; the data of one may be spoilt, so that its update cannot be used."""
    data = tiny.federation(sizes)
    if spoilt is None:
        return data
    x = data.x.clone()
    x[data.clients[spoilt]] = 1e308  # whose sums are not finite
    return replace(data, x=x)


def play(name: str, folder: Path, **others: Any) -> None:
    """Play one of the runs."""
    method, changes = {**RUNS, **STACKED}[name]
    sizes = SIZES if name in RUNS or name == "stacked-own-state" else (8,) * len(SIZES)
    data = federation(1 if name.endswith("without-one") else None, sizes)
    changes = {"train__dtype": "float32" if name == "plain" else "float64", **changes, **others}
    run(tiny.config(**changes), method=method, model=tiny.residual_net(), federation=data, out=folder)


def play_stacked(root: Path) -> dict[str, dict[str, int]]:
    """Play the runs of stacks; returns how often clients were trained by programs, and how often step by step."""
    slot.DEVICES = {"cpu"}
    trained = count_training()
    told: dict[str, dict[str, int]] = {}
    for name in STACKED:
        trained.clear()
        play(name, root / name, engine__name="stacked")
        told[name] = dict(trained)
    return told


def median(old: Tree, clients: Tree, weights: Tensor, memory: Tree) -> tuple[Tree, Tree]:
    """A merge that joins clients in its own way."""
    return {part: clients[part].median(0).values for part in old}, memory


def clumsy(method: Method) -> Method:
    """A method whose third client in a process fails; of two ranks with five clients only the second has three."""
    left = [2]

    def measure(end: Tree, start: Tree, facts: Facts) -> Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise FednormError("a ruler broke")
        return torch.zeros(())

    return method.map_phases(lambda phase: replace(phase, measures={"length": measure}))


def failing(name: str) -> None:
    """Play a run that must fail."""
    methods = {
        "lock-step": parse("fedtan"),
        "union": parse("centralized"),
        "own-merge": replace(merge_by(median, Kind.WEIGHT)(parse("fedavg")), name="mine"),
        "diverged": parse("fedavg"),
        "one-rank-fails": replace(clumsy(parse("fedavg")), name="mine"),
    }
    data = federation(spoilt=4 if name == "diverged" else None)
    run(tiny.config(), method=methods[name], model=tiny.residual_net(), federation=data)


FAILING = ("lock-step", "union", "own-merge", "diverged", "one-rank-fails")


def reduce_on_gpus(root: Path) -> None:
    """Reduce a cohort of which each GPU has a part, and compare with the host."""
    join("cuda")
    rank, counts = int(os.environ["RANK"]), [3, 2][: int(os.environ["WORLD_SIZE"])]
    stack = torch.arange(12 * sum(counts), dtype=torch.float32).reshape(-1, 12).sin()
    weights = torch.softmax(torch.arange(sum(counts), dtype=torch.float64), 0)
    spread = SpreadCohort(rank, counts)
    mine, shares = spread.own(stack).cuda(), spread.own(weights).cuda()
    far = (spread.weighted_sum(mine, shares).cpu() - fold(stack, weights)).abs().max().item()
    equal = [torch.equal(spread.gathered(mine).cpu(), stack), torch.equal(spread.largest(mine).cpu(), stack.amax(0))]
    (root / f"rank{rank}.json").write_text(json.dumps({"far": far, "equal": equal}))


def main(root: Path) -> None:
    torch.set_num_threads(1)
    for name in RUNS:
        play(name, root / name)
    ends: dict[str, list[Any]] = {}
    for name in FAILING:
        try:
            failing(name)
        except FednormError as error:
            ends[name] = [error.exit_code, str(error)]
    told = {**ends, "trained": play_stacked(root)}
    (root / f"rank{os.environ['RANK']}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    (reduce_on_gpus if "gpu" in sys.argv else main)(Path(sys.argv[1]))
