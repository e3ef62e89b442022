"""Feed readers of foreign files with damaged ones and count what becomes of them: every failure must be a typed one.

    python tools/fuzz.py --cases 100000 --target expression
    python tools/fuzz.py --total 2000000 --record

What is fed follows from the seed alone. `--total` shares its cases among all targets by how fast they are; with
`--target` each has the share it would have had.
"""

from __future__ import annotations

import argparse
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).parent))

from counting import record
from fuzz_targets import Target, target

from fednorm.errors import FednormError

SHARES = {"grammar": 0.45, "wire": 0.2, "idx": 0.1, "safetensors": 0.08, "config": 0.05, "toml": 0.04}
SHARES |= {"expression": 0.03, "csv": 0.015, "npz": 0.01, "packed": 0.01, "mat": 0.01, "libsvm": 0.005, "result": 0.01}
SHARES |= {"store": 0.002, "image": 0.01, "parquet": 0.005}
HANG_SECONDS = 10
MEMORY = 4 << 30
"""Bytes that reading may take beyond what the process has when it begins."""


def mutated(data: bytes, target: Target, draw: random.Random) -> bytes:
    """A seed with a few things changed."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 6))):
        at = draw.randrange(len(changed) + 1)
        end = min(len(changed), at + draw.choice((1, 1, 2, 4, 8, 32, len(changed))))
        match draw.randrange(9):
            case 0 | 1 if at < len(changed):
                changed[at] ^= 1 << draw.randrange(8)
            case 2 if at < len(changed):
                changed[at] = draw.choice((0, 1, 127, 128, 255, draw.randrange(256)))
            case 3:
                del changed[at:end]
            case 4:
                changed[at:at] = changed[at:end]
            case 5 if target.words:
                changed[at:at] = draw.choice(target.words)
            case 6 if target.words:
                changed[at:end] = draw.choice(target.words)
            case 7:
                changed[at:at] = bytes(draw.randrange(256) for _ in range(draw.choice((1, 2, 8))))
            case _:
                other = draw.choice(target.seeds)
                start = draw.randrange(len(other) + 1)
                changed[at:end] = other[start : start + draw.choice((1, 4, 16, 64))]
    return bytes(changed)


def fuzz(reader: Target, name: str, cases: int, seed: int, seconds: float = float("inf")) -> Counter[str]:
    """What became of so many inputs, or of as many as the time allows, by type of error."""
    found: Counter[str] = Counter()
    until = time.monotonic() + seconds
    for number in range(cases):
        if time.monotonic() > until:
            break
        draw = random.Random(f"{seed} {name} {number}")  # noqa: S311 (which bytes, not a secret)
        data = reader.refine(mutated(draw.choice(reader.seeds), reader, draw), draw)
        signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)
        try:
            reader.read(data)
            found["read"] += 1
        except FednormError as error:
            found[type(error).__name__] += 1
        except Exception as error:  # whatever else comes is what is looked for
            found["untyped"] += 1
            print(f"{name} case {number}: {type(error).__name__}: {error}"[:400])
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    return found


def _hang(*_: object) -> NoReturn:
    raise TimeoutError(f"more than {HANG_SECONDS} s")


def fuzz_all(cases: dict[str, int], seed: int, seconds: float = float("inf")) -> dict[str, Counter[str]]:
    """The outcomes by target."""
    place = Path(tempfile.mkdtemp(prefix="fuzz-"))
    before = signal.signal(signal.SIGALRM, _hang)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # libraries warn of what they are fed
            return {name: fuzz(target(name, place), name, number, seed, seconds) for name, number in cases.items()}
    finally:
        signal.signal(signal.SIGALRM, before)
        shutil.rmtree(place)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--target", nargs="*", choices=sorted(SHARES), help="these readers alone")
    parser.add_argument("--cases", type=int, default=1000, help="inputs for each target")
    parser.add_argument("--total", type=int, help="inputs for all targets together, shared by their speed")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="at most so long for each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true", help="keep the counts for docs/reliability.md")
    asked = parser.parse_args(arguments)
    shares = {name: share for name, share in SHARES.items() if not asked.target or name in asked.target}
    cases = {name: round(asked.total * share) if asked.total else asked.cases for name, share in shares.items()}
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    counts = fuzz_all(cases, asked.seed, asked.seconds)
    for name, found in counts.items():
        print(f"{name}: {found.total()} cases, {dict(found)}")
    if asked.record:
        amount = f"--total {asked.total}" if asked.total else f"--cases {asked.cases}"
        record("fuzz", f"python tools/fuzz.py {amount} --seed {asked.seed}", counts)
    return int(any(found["untyped"] for found in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
