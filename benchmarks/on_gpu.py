"""All that wants a GPU, in one go: first whether results are right there, then the figures of this folder's page.

    python benchmarks/on_gpu.py --minutes 25 --out results_of_today [--parts kernels,models]

Every part is a process of its own. What it prints is in OUT/PART.log; what it measured is in OUT/PART.json once it is
done, and in OUT/PART.partial.json until then. What is done is not played again, so the same command goes on after a
stop. A part for which time is too short is interrupted, and played anew the next time. No data sets are needed.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
GRACE = 30.0
"""Seconds that an interrupted part has to write what it has."""


@dataclass(frozen=True)
class Part:
    """A command, how long it may take, and whether it is told where to write its result."""

    name: str
    command: tuple[str, ...]
    minutes: float
    writes: bool = True


def _bench(name: str, minutes: float, *options: str) -> Part:
    return Part(name, ("-m", "fednorm", "bench", *options, "--repeats", "3", "--quiet"), minutes)


PARTS = (
    Part("kernels", ("tests/kernel_checks.py",), 3, writes=False),
    Part("same_bits", ("tests/gpu_same_bits.py", "--precision", "bf16"), 5, writes=False),
    _bench("gpu", 6, "gpu", "--precisions", "bf16,tf32"),
    Part("gpu_models", ("benchmarks/models_at_once.py",), 14),
    Part("first_rows", ("benchmarks/first_rows.py",), 4),
    Part("gpu_packed", ("benchmarks/packed.py", "--whole", "64000"), 8),
    _bench("async_cuda", 5, "async"),
    _bench("gpu_rounds", 3, "rounds"),
    _bench("gpu_pfl", 2, "pfl", "--precision", "tf32"),
    Part("unequal_cuda", ("benchmarks/unequal.py",), 4),
    Part("tests", ("-m", "pytest", "-p", "no:cacheprovider", "tests/test_gpu.py"), 8, writes=False),
)


def _waited(process: subprocess.Popen[bytes], end: float) -> int | None:
    """A process's exit code; None where time was too short, so that it was interrupted."""
    try:
        return process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        return None


def play(part: Part, seconds: float, out: Path) -> str:
    """Play a part for so long at most; how it ended, in words."""
    result, begun = out / f"{part.name}.json", time.monotonic()
    partial = out / f"{part.name}.partial.json"
    command = [sys.executable, *part.command, *(("--out", str(partial)) if part.writes else ())]
    with (
        (out / f"{part.name}.log").open("w") as log,
        subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        try:
            code = _waited(process, begun + min(seconds, 60 * part.minutes))
        finally:
            process.kill()  # it does not outlive this part
    if code is None:
        return f"interrupted after {time.monotonic() - begun:.0f} s"
    if code:
        return f"failed with exit code {code}"
    if part.writes:
        partial.rename(result)
    return f"done in {time.monotonic() - begun:.0f} s"


def play_all(parts: Sequence[Part], minutes: float, out: Path) -> int:
    """Play the parts that have no result yet, as far as time goes; how many did not come to a good end."""
    out.mkdir(parents=True, exist_ok=True)
    end, bad = time.monotonic() + 60 * minutes, 0
    for part in parts:
        left = end - time.monotonic()
        if (out / f"{part.name}.json").exists():
            told = "was there"
        elif left <= 0:
            told, bad = "not played, time is over", bad + 1
        else:
            told = play(part, left, out)
            bad += not told.startswith("done")
        print(f"{part.name}: {told}", flush=True)
    return bad


def main() -> None:
    names = ",".join(part.name for part in PARTS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=25.0, help="for all of it")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--parts", default=names, metavar="LIST", help=f"some of {names}, in that order")
    asked = parser.parse_args()
    wanted = asked.parts.split(",")
    if unknown := set(wanted) - set(names.split(",")):
        parser.error(f"--parts {','.join(sorted(unknown))} is not known; give some of {names}")
    sys.exit(bool(play_all([part for part in PARTS if part.name in wanted], asked.minutes, asked.out.resolve())))


if __name__ == "__main__":
    main()
