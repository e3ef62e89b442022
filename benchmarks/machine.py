"""What a measurement was made on: hardware, versions, commit and command, as every result file holds them."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import fednorm


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Facts that a reader needs to judge or repeat a measurement; nothing that names a host or a user."""
    return {
        "command": " ".join(["python", "benchmarks/" + Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": _commit(),
        "hardware": {
            "device": device.type,
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        },
        "versions": {
            "fednorm": fednorm.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "system": platform.system(),
        },
    }


def _cpu() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str:
    """The commit of the checkout, with `+` where files differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    return (git("rev-parse", "HEAD") or "unknown") + ("+" if git("status", "--porcelain", "--", "../src") else "")
