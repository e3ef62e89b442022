"""Rounds on NVFlare's simulator: fednorm over tasks and over Collab, beside NVFlare's own FedAvgRecipe, in one run.

    python benchmarks/peers/nvflare_rounds.py --out benchmarks/results/nvflare.json

It needs an environment with nvflare and fednorm. All play FedAvg with the same model, data, batches and optimizer, and
with a process a site. Every timing is a simulator of its own, which plays some rounds before those that count; the
order of variants turns from repeat to repeat. fednorm's rounds are timed at the server from row to row, NVFlare's from
one model's arrival at the first site to the next.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from fednorm import RunConfig
from fednorm.bench.machine import describe_machine
from fednorm.files import write_json
from fednorm.running.config import updated
from fednorm.running.plan import build_model, make_plan

HERE = Path(__file__).parent
SITES, WARM = 2, 3
INTERVAL = 0.05
"""Seconds between two looks for a task, as fednorm's recipe sets them; NVFlare's default is 2."""
FIELDS = {
    "method": "fedavg",
    "model": "fedbs_mnist_cnn",
    "data.clients": SITES,
    "data.train_limit": 400,
    "train.local_steps": 1,
    "train.batch_size": 20,
    "train.lr": 0.02,
    "train.momentum": 0.0,
    "engine.device": "cpu",
    "engine.threads": 1,
}


def config_for(rounds: int) -> RunConfig:
    return updated(RunConfig(), {**FIELDS, "rounds": rounds, "eval.every": rounds})


def settled(rounds: int):  # type: ignore[no-untyped-def]
    """The plan that all variants play, and the model they start from."""
    torch.set_num_threads(1)
    plan = make_plan(config_for(rounds))
    return plan, build_model(plan.config, plan.federation)


def ours(rounds: int, folder: Path, transport: str) -> list[float]:
    """fednorm's recipe."""
    from nvflare.recipe import SimEnv

    from fednorm.nvflare import Recipe

    recipe = Recipe(config=config_for(rounds), name="ours", transport=transport)
    recipe.execute(SimEnv(num_clients=SITES, num_threads=SITES, workspace_root=str(folder)))
    records = folder / "ours" / "server" / "simulate_job" / "fednorm" / "metrics.jsonl"
    return [json.loads(line)["seconds"] for line in records.read_text().splitlines()]


def plain(rounds: int, folder: Path, interval: float | None) -> list[float]:
    """NVFlare's own recipe, with its own interval or ours."""
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
    from nvflare.recipe import SimEnv
    from nvflare_model import Net

    recipe = FedAvgRecipe(
        name="plain",
        model=Net(),
        min_clients=SITES,
        num_rounds=rounds + 1,
        train_script=str(HERE / "nvflare_site.py"),
        train_args=f"--rounds {rounds} --moments {folder / 'moments'}",
    )
    if interval is not None:
        recipe.add_server_config({"server": {"task_request_interval": interval}})
    recipe.execute(SimEnv(num_clients=SITES, num_threads=SITES, workspace_root=str(folder)))
    moments = [float(line) for line in (folder / "moments").read_text().splitlines()]
    return [after - before for before, after in pairwise(moments)]


VARIANTS = {
    "fednorm, tasks": lambda rounds, folder: ours(rounds, folder, "tasks"),
    "fednorm, Collab": lambda rounds, folder: ours(rounds, folder, "collab"),
    f"FedAvgRecipe, asking every {INTERVAL} s": lambda rounds, folder: plain(rounds, folder, INTERVAL),
    "FedAvgRecipe as it is": lambda rounds, folder: plain(rounds, folder, None),
}


def play(variant: str, rounds: int) -> None:
    """One timing, in a process of its own: its rounds as a line of JSON, the last."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        seconds = VARIANTS[variant](rounds, Path(folder))
    print(json.dumps({"seconds": seconds[WARM:]}), flush=True)


def timed(variant: str, rounds: int) -> float:
    """The median round of one timing."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HOME": home, "PYTHONPATH": paths}
        command = [sys.executable, __file__, "--play", variant, "--rounds", str(rounds)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
    return statistics.median(json.loads(lines[-1])["seconds"])


def measured(times: dict[str, list[float]]) -> dict[str, Any]:
    """Timings as every result file has them."""
    workload = f"{SITES} sites of a small CNN, one step a round"
    found = [
        {
            "workload": workload,
            "variant": variant,
            "unit": "s a round",
            "median": statistics.median(each),
            "low": min(each),
            "high": max(each),
            "timings": len(each),
        }
        for variant, each in times.items()
    ]
    return {"settings": {"sites": SITES, "warm rounds": WARM, **FIELDS}, "measurements": found}


def told(times: dict[str, list[float]]) -> dict[str, Any]:
    """The result so far; ratios are to the quicker of NVFlare's two."""
    section = measured(times)
    ours_by_tasks, ours_by_calls, *plain_ones = (each["median"] for each in section["measurements"])
    about = describe_machine(torch.device("cpu"), ["python", "benchmarks/peers/nvflare_rounds.py", *sys.argv[1:]])
    about["versions"]["nvflare"] = metadata.version("nvflare")
    ratios = {
        "ratio.tasks/plain": ours_by_tasks / min(plain_ones),
        "ratio.collab/plain": ours_by_calls / min(plain_ones),
    }
    return {"benchmark": "rounds on NVFlare", **about, **ratios, "sections": {"nvflare": section}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--play", choices=VARIANTS, help="one timing of one variant alone")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3, help="timings of every variant, 1 or more")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.play:
        play(given.play, given.rounds)
        sys.exit()
    names = list(VARIANTS)
    times: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(given.repeats):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            times[name].append(timed(name, given.rounds))
            print(f"{name}: {times[name][-1]:.3f} s a round", file=sys.stderr, flush=True)
        result = told(times)
        if given.out:  # after every repeat: who stops it in between has what was measured
            write_json(given.out, result)
    print(json.dumps({key: value for key, value in result.items() if key.startswith("ratio.")}))
