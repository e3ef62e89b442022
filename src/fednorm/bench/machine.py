"""What a measurement was made on: hardware, versions, commit and command, as every result file holds them."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fednorm.engines.machine import device_name
from fednorm.running.environment import commit, gpu_name, versions


def describe_machine(device: torch.device, command: Sequence[str] | None = None) -> dict[str, Any]:
    """Facts that a reader needs to judge or repeat a measurement; nothing that names a host or a user."""
    script = ["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]
    return {
        "command": shlex.join(command or script),
        "commit": commit(),
        "hardware": {
            "device": device.type,
            "cpu": device_name(torch.device("cpu")),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpu": gpu_name(device),
        },
        "versions": {**versions(), "cuda": torch.version.cuda, "system": platform.system()},
    }
