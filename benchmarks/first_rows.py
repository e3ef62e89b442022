"""How long a run's first row takes on a GPU, without kernels on disk and with them, each in a process of its own.

    python benchmarks/first_rows.py
    python benchmarks/first_rows.py --models mobilenet_v2:5 --local-steps 10

From the plan on, as users wait for it: without the import of torch, with all that is traced, compiled and captured. One
process goes before and is not counted, so that what is timed reads its libraries from memory, as on a machine in use.
Writes benchmarks/results/gpu_first_rows.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from fednorm.bench.cases import read_cases
from fednorm.bench.machine import describe_machine
from fednorm.bench.models import stacked
from fednorm.bench.options import Options
from fednorm.bench.timing import Effort
from fednorm.engines.machine import find_device
from fednorm.files import write_json

CACHES = "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"
STATES = "nothing on disk", "kernels on disk"
"""How the first process finds the compilers' folders, and how it leaves them to the second."""


def first_row(case: str, asked: argparse.Namespace) -> float:
    """Seconds to the first row of a case, in this process."""
    (found,) = read_cases(case, (5,))
    options = Options(
        sections=("models",), device=find_device(asked.device), effort=Effort(), cases=(found,),
        local_steps=asked.local_steps,
    )  # fmt: skip
    precision = "bf16" if options.device.type == "cuda" else "fp32"
    steps = stacked(found, found.clients[0], precision, options)
    steps(0.0)
    assert steps.rounds is not None
    assert steps.rounds.first_row is not None
    seconds = steps.rounds.first_row
    steps.rounds.close()
    return seconds


def in_a_process(case: str, caches: str, asked: argparse.Namespace) -> float:
    """The same in a process of its own, whose compilers keep what they make in a folder."""
    command = [sys.executable, __file__, "--only", case, "--device", asked.device]
    command += ["--local-steps", str(asked.local_steps)]
    environment = {**os.environ, **{name: str(Path(caches) / name) for name in CACHES}}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet20:5,mobilenet_v2:5", help="as fednorm bench models takes them")
    parser.add_argument("--local-steps", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu_first_rows.json")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.only:
        print(json.dumps(first_row(asked.only, asked)))
        return
    result: dict[str, Any] = {"benchmark": "first rows", **describe_machine(find_device(asked.device))}
    result |= {"local_steps": asked.local_steps, "seconds_to_first_row": {}}
    cases = [f"{each.name}:{clients}" for each in read_cases(asked.models, (5,)) for clients in each.clients]
    with tempfile.TemporaryDirectory() as caches:
        in_a_process(cases[0], caches, asked)
    for case in cases:
        with tempfile.TemporaryDirectory() as caches:
            found = {name: round(in_a_process(case, caches, asked), 2) for name in STATES}
        result["seconds_to_first_row"][case] = found
        print(f"{case}: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in found.items()), flush=True)
        write_json(asked.out, result, indent=1)


if __name__ == "__main__":
    main()
