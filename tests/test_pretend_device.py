"""Runs on a device that is not the host's memory: what would meet a tensor of the host on a GPU is seen without one.

Where clients are stacked, whole rounds stay on the device, traced as they are on a GPU.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

from fednorm.methods import known_methods

METHODS = tuple(known_methods())
REVIVE = "freeze=0,warmup=0,batch=6,latent=4,width=2,crop=1,kd_batch=3,kd_steps=2,teachers=2,s_max=1.0,probes=4"
ON_A_CLOCK = (
    "fedbuff(b=2)+fedbn",
    "fedasync+silobn",
    "afl-dw+fixbn",
    "ca2fl(b=2)+gn",
    "sync+local-momentum",
    f"fedrevive({REVIVE})+gn",
    f"fedrevive({REVIVE},statistics=bn,proportions=true)+fedavg",
    f"fedrevive({REVIVE},statistics=bn)+fedbn(report=true)",
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
        reason="this torch knows no devices that are written in Python",
    ),
]


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize("expressions", [METHODS[::2], METHODS[1::2], ON_A_CLOCK], ids=["half", "the others", "clock"])
def test_nothing_of_the_host_meets_what_lies_on_the_device(engine: str, expressions: tuple[str, ...]) -> None:
    script = Path(__file__).with_name("pretend_device.py")
    command = [sys.executable, str(script), engine, *expressions]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [f"{each}: equal" for each in expressions]
