"""What a measurement was made on: hardware, versions, commit and command, as every result file holds them."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import fednorm


def describe_machine(device: torch.device, command: Sequence[str] | None = None) -> dict[str, Any]:
    """Facts that a reader needs to judge or repeat a measurement; nothing that names a host or a user."""
    script = ["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]
    return {
        "command": shlex.join(command or script),
        "commit": commit(),
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
            "cuda": torch.version.cuda,
            "system": platform.system(),
        },
    }


def _cpu() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """The commit of the checkout, with `+` where files differ from it; FEDNORM_COMMIT names it where git cannot."""
    named = os.environ.get("FEDNORM_COMMIT")
    if named:
        return named
    source = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        try:
            done = subprocess.run(  # noqa: S603
                ["git", *arguments],  # noqa: S607
                cwd=source,
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError:  # there is no git here
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    # An installed package may lie in somebody else's repository.
    if not git("ls-files", "--", "__init__.py"):
        return "unknown"
    return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--", ".") else "")
