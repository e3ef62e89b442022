"""`fednorm bench models` with all models made ready side by side, then timed one after the other.

    python benchmarks/models_at_once.py                                     # the published table
    python benchmarks/models_at_once.py --models resnet18:5/20,vit_tiny:5

What takes long in that benchmark are compilers, which use one core each. Every model and number of clients has a
process of its own here, which waits until the GPU is its own; all lie in its memory until then. The seconds to a first
row are left out, since they are those of a machine with other work: benchmarks/first_rows.py measures them. Writes
benchmarks/results/gpu_models.json.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fednorm.bench import sections
from fednorm.bench.cases import TABLE, read_cases
from fednorm.bench.options import Options
from fednorm.bench.timing import Effort
from fednorm.engines.machine import find_device
from fednorm.files import read_json, write_json

READY = "ready"
NOT_ALONE = "seconds_to_first_row"
"""What is measured while others are made ready."""


def measure_one(case: str, asked: argparse.Namespace) -> None:
    """In a process of its own: make a case ready, say so, wait for a line, and time it."""

    def ready() -> None:
        print(READY, flush=True)
        sys.stdin.readline()

    device = find_device(asked.device)
    effort = Effort(asked.repeats, asked.seconds, ready=ready)
    options = Options(sections=("models",), device=device, effort=effort, cases=read_cases(case, (5,)))
    report = sections.measure_all(options, shlex.split(asked.command), quiet=False, out=asked.out)
    if report.interrupted or not report.sections[0].measurements:
        sys.exit(1)


def measure_all(cases: Sequence[str], asked: argparse.Namespace) -> int:
    """Time cases, and write after each what is there; how many failed."""
    own = ("--device", asked.device, "--repeats", str(asked.repeats), "--seconds", str(asked.seconds))
    # Side by side, each compiler needs no helpers of its own.
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": "1", **os.environ}
    whole: dict[str, Any] = {}
    bad = 0
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        started: list[tuple[str, Path, subprocess.Popen[str]]] = []
        for index, case in enumerate(cases):
            out = Path(folder) / f"{index}.json"
            command = [sys.executable, __file__, "--only", case, "--out", str(out), "--command", asked.command, *own]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
            running.enter_context(process)
            running.callback(process.kill)
            started.append((case, out, process))
        ready = [process.stdout.readline().strip() == READY for _, _, process in started if process.stdout]
        print(f"{sum(ready)} of {len(ready)} ready", flush=True)
        for (case, out, process), is_ready in zip(started, ready, strict=True):
            process.communicate("go\n" if is_ready else None)
            if process.returncode or not is_ready:
                print(f"{case}: no result", flush=True)
                bad += 1
                continue
            result = read_json(out)
            result.pop(NOT_ALONE, None)
            whole = joined(whole, result) if whole else result
            write_json(asked.out, whole, indent=1)
            print(f"{case}: done", flush=True)
    return bad


def joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Two results of the same command as one: lists one behind the other, numbers by their names."""
    found = dict(one)
    for key, value in other.items():
        mine = found.get(key)
        if isinstance(mine, dict) and isinstance(value, dict):
            found[key] = joined(mine, value)
        elif isinstance(mine, list) and isinstance(value, list):
            found[key] = mine + [each for each in value if each not in mine]
        else:
            found.setdefault(key, value)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=TABLE, help="as fednorm bench models takes them")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=3, help="timings of each variant")
    parser.add_argument("--seconds", type=float, default=0.5, help="of one timing, at least")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu_models.json")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--command", default=shlex.join(["python", *sys.argv]), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.only:
        measure_one(asked.only, asked)
        return
    cases = [f"{case.name}:{clients}" for case in read_cases(asked.models, (5,)) for clients in case.clients]
    sys.exit(bool(measure_all(cases, asked)))


if __name__ == "__main__":
    main()
