"""What this machine offers: versions, accelerators, optional packages, data, and the speed of a small round."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

EXTRAS = {
    "report": ("matplotlib", "pandas"),
    "data": ("pillow",),
    "table": ("pyarrow",),
    "track": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow-skinny",),
    "zoo": ("torchvision", "timm"),
    "nvflare": ("nvflare",),
}


def examine() -> dict[str, Any]:
    """All that `fednorm doctor` tells, as plain values."""
    import torch

    from fednorm.running.environment import gpu_name, versions

    return {
        **versions(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "free_disk_bytes": shutil.disk_usage(Path.cwd()).free,
        "cuda": gpu_name(),
        "mps": torch.backends.mps.is_available(),
        "bf16": torch.cuda.is_bf16_supported() if torch.cuda.is_available() else False,
        "torchvision": torchvision_state(),
        "extras": {extra: {name: version(name) for name in names} for extra, names in EXTRAS.items()},
        "data_folder": os.environ.get("FEDNORM_DATA"),
        "datasets": datasets_here(),
        "seconds_per_round": seconds_of_a_round(),
    }


def version(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def torchvision_state() -> str:
    """Whole, absent, or what is wrong with it: built for another torch, its import fails, and may take Python along."""
    if importlib.util.find_spec("torchvision") is None:
        return "absent"
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import torchvision; torchvision.ops.nms"],  # not one that lies in this folder
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode == 0:
        return "whole"
    return f"broken: {(done.stderr.strip().splitlines() or [f'ended with {done.returncode}'])[-1]}"


def datasets_here() -> list[str]:
    """Names of the sets that a run could use now."""
    from fednorm.data.registry import DATASETS
    from fednorm.data.verify import describe_dataset

    return [name for name in DATASETS if describe_dataset(name)["here"]]


def seconds_of_a_round() -> float:
    """Seconds of one round of the demo's size: 5 clients, 10 steps of 20 images, small_resnet; scoring not counted."""
    from fednorm.running.config import RunConfig, updated
    from fednorm.running.plan import make_plan
    from fednorm.running.run import Run
    from fednorm.running.store import Store

    config = updated(RunConfig(), {"rounds": 3, "train.local_steps": 10, "eval.every": 3, "data.train_limit": 1000})
    rounds = Run(make_plan(config), Store()).rounds()
    next(rounds)  # the first one also pays for what torch sets up once
    started = time.perf_counter()
    next(rounds)
    return round(time.perf_counter() - started, 3)


def missing_line(extra: str, found: dict[str, str | None]) -> str | None:
    """The pip line for an extra that is not whole.

    >>> missing_line("data", {"pillow": None})
    'pip install "fednorm[data]"'
    """
    return None if all(found.values()) else f'pip install "fednorm[{extra}]"'
