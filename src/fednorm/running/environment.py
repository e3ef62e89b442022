"""Where and with what something ran: hardware, versions and commit, as env.json and every benchmark hold them."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import fednorm


def environment() -> dict[str, Any]:
    """What env.json holds, so that a number can be traced to what made it."""
    return {
        **versions(),
        "commit": commit(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu_name(),
        "command": shlex.join(sys.argv),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def versions() -> dict[str, str]:
    """Versions of what computes."""
    return {"fednorm": fednorm.__version__, "python": platform.python_version(), "torch": torch.__version__}


def gpu_name(device: torch.device | None = None) -> str | None:
    """The name of a CUDA device, by default of the first; None where there is none."""
    if not torch.cuda.is_available() or (device and device.type != "cuda"):
        return None
    return torch.cuda.get_device_name(device)


def commit() -> str:
    """The commit of the checkout, with `+` where files differ from it; FEDNORM_COMMIT names it where git cannot."""
    named = os.environ.get("FEDNORM_COMMIT")
    if named:
        return named
    source = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        try:
            # Only to look: `git status` would write the index anew, and ended in that, leave a lock behind.
            done = subprocess.run(  # noqa: S603
                ["git", "--no-optional-locks", *arguments],  # noqa: S607
                cwd=source,
                capture_output=True,
                text=True,
                timeout=5,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):  # there is no git here, or its disk is slow
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    # An installed package may lie in somebody else's repository.
    if not git("ls-files", "--", "__init__.py"):
        return "unknown"
    return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--", ".") else "")
