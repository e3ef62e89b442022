"""Where the time of a step goes on a GPU: by kernel, how many launches and how long, beside what the step takes.

    python benchmarks/profile_step.py --models resnet20:5/15,resnet18:5 --out profile.json

Cases are written as `fednorm bench models` takes them, whose results have these profiles too. A kernel that serves
layers of several sizes shows its shortest and its longest launch.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import Any

import torch

from fednorm.bench.cases import TABLE, Case, read_cases
from fednorm.bench.machine import describe_machine
from fednorm.bench.models import stacked
from fednorm.bench.options import Options
from fednorm.bench.profiles import MOST, Profile, profile_of
from fednorm.bench.timing import Effort
from fednorm.errors import FednormError, first_line
from fednorm.files import write_json


def profiled(case: Case, clients: int, options: Options) -> tuple[float, Profile]:
    """Milliseconds of a step by the clock, and by kernel, of a case's clients in a stack."""
    steps = stacked(case, clients, options.precision or "bf16", options)
    steps(0.0)
    seconds = steps(0.3)
    assert steps.rounds is not None
    found = profile_of(steps.rounds, options.local_steps)
    steps.rounds.close()
    return 1e3 * seconds, found


def show(name: str, clients: int, ms_a_step: float, found: Profile) -> None:
    head = f"{name}, {clients} clients: {ms_a_step:.3f} ms a step"
    print(f"{head}, kernels {found.busy_ms:.3f}, {found.launches:.0f} launches")
    for each in found.kernels[:MOST]:
        spread = f"{each.shortest:6.1f} to {each.longest:6.1f} us"
        print(f"  {each.us:8.1f} us  {each.launches:6.1f} x  {spread}  {each.name[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=TABLE, help="as fednorm bench models takes them")
    parser.add_argument("--local-steps", type=int, default=10)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, metavar="FILE")
    asked = parser.parse_args()
    cases = read_cases(asked.models, (5,))
    options = Options(
        sections=("models",), device=torch.device(asked.device), effort=Effort(), cases=cases,
        local_steps=asked.local_steps, precision=asked.precision,
    )  # fmt: skip
    results: list[dict[str, Any]] = []
    for case in cases:
        for clients in case.clients:
            try:
                ms_a_step, found = profiled(case, clients, options)
            except (RuntimeError, FednormError) as error:
                print(f"{case.name}, {clients} clients left out: {first_line(error)}", flush=True)
                continue
            show(case.name, clients, ms_a_step, found)
            results.append({"model": case.name, "clients": clients, "ms_a_step": ms_a_step, **found.to_json()})
            if asked.out:
                write_json(asked.out, {"machine": describe_machine(options.device), "steps": results}, indent=1)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
