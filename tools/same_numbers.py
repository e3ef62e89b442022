"""Play two commits on this machine and compare what came out, bit for bit: a refactor must change no number.

python tools/same_numbers.py BASE [HEAD] [--engines NAME ...] [--methods EXPRESSION ...] [--quick] [--cache DIR]

HEAD is the working tree unless a commit is named. Every method, some variants and some pairs are played by every
engine, with all clients and with some a round; compared are the rows, the server's and the clients' state, the facts
that a run resumes from, and the result. Exit code 0: all equal, 1: something differs, 2: bad input.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
PLAYER = Path(__file__).with_name("same_numbers_player.py")
ENGINES = ("traced", "workers", "ranks", "stacked", "sequential")
"""Those that take longest first, so that two cores end about together."""
QUICK = (
    *("fedavg", "fedbn", "fedtan", "posthoc", "fedavgm+hbn", "fedadam+fixbn", "fedbs+local-momentum"),
    *("fixbn(at=window,window=2,tau=100.0)", "fedbn+gn"),
)
SECONDS = 1800
"""How long one engine may take; a rank whose partner died of a bug would wait as long."""
PLAYERS: list[subprocess.Popen[bytes]] = []
"""All that were started, to be ended with this process."""

Played = dict[tuple[str, str], dict[str, Any]]
"""What each run left, by expression and participation."""


class BadInput(Exception):
    """Something the user gave cannot be used; the text is one line."""


@dataclass(frozen=True)
class Side:
    """One of the two that are compared; without a commit the working tree."""

    name: str
    commit: str | None

    def __str__(self) -> str:
        return f"{self.name} ({self.commit[:9] if self.commit else 'working tree'})"


def git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)  # noqa: S603, S607
    if done.returncode:
        raise BadInput(f"git {' '.join(arguments)}: {' '.join(done.stderr.split()) or 'failed'}")
    return done.stdout.strip()


def find_commit(name: str) -> str:
    try:
        return git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    except BadInput:
        raise BadInput(f"'{name}' is not a commit of {ROOT}; give a hash, a branch or a tag") from None


@contextlib.contextmanager
def checked_out(side: Side) -> Iterator[Path]:
    """The folder with a side's files; that of a commit is removed afterwards."""
    if side.commit is None:
        yield ROOT
        return
    with tempfile.TemporaryDirectory(prefix="same-numbers-") as folder:
        place = Path(folder) / "checkout"
        git("worktree", "add", "--detach", "--quiet", str(place), side.commit)
        try:
            yield place
        finally:
            git("worktree", "remove", "--force", str(place))


def play(checkout: Path, engine: str, methods: list[str], folder: Path, keep: bool) -> tuple[Path, str]:
    """Let a checkout's fednorm play with one engine: the file with what came out, and how it broke off, if it did."""
    folder.mkdir(parents=True)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"] if engine == "ranks" else []
    command = [sys.executable, *torchrun, str(PLAYER), engine, "played.jsonl", "runs", *methods]
    # One thread, since the order of sums must not depend on how busy the machine is.
    env = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    env.pop("KEEP", None)
    with (folder / "stderr.txt").open("w") as stderr:
        process = subprocess.Popen(  # noqa: S603
            command,
            cwd=folder,  # run folders have the same relative path on both sides, for texts that name it
            env={**env, "KEEP": "1"} if keep else env,
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
        )
        PLAYERS.append(process)
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            return folder / "played.jsonl", f"took more than {SECONDS} seconds"
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun ends its ranks; killed, it could not
                process.wait()
    if process.returncode == 0:
        return folder / "played.jsonl", ""
    said = [line for line in (folder / "stderr.txt").read_text().splitlines() if "Error" in line]
    return folder / "played.jsonl", f"ended with exit code {process.returncode}: {(said or ['no error was told'])[0]}"


def cache_name(commit: str, engine: str, methods: list[str]) -> str:
    """A name that changes with all that decides what a commit's runs leave on this machine."""
    parts = [PLAYER.read_text(), sys.version, metadata.version("torch"), *methods]
    return f"{commit[:12]}-{engine}-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:12]}.jsonl"


def play_all(sides: list[Side], options: argparse.Namespace, work: Path) -> dict[tuple[Side, str], tuple[Played, str]]:
    """What every side's engines left, two at a time; a commit that was played before is read from the cache."""
    found: dict[tuple[Side, str], tuple[Played, str]] = {}
    cached: dict[tuple[Side, str], Path] = {}
    for side in sides:
        for engine in options.engines:
            if options.cache and side.commit:
                cached[side, engine] = options.cache / cache_name(side.commit, engine, options.methods)
    known = {key for key, path in cached.items() if path.exists()}
    for side, engine in known:
        found[side, engine] = read_played(cached[side, engine]), ""
        print(f"{side}, {engine}: from the cache", flush=True)
    with contextlib.ExitStack() as held, ThreadPoolExecutor(2) as two:
        left = [(side, engine) for engine in options.engines for side in sides if (side, engine) not in known]
        places = {side: held.enter_context(checked_out(side)) for side in dict.fromkeys(side for side, _ in left)}

        def one(side: Side, engine: str) -> None:
            start = time.perf_counter()
            folder = work / side.name.lower() / engine
            file, trouble = play(places[side], engine, options.methods, folder, options.keep is not None)
            found[side, engine] = read_played(file), trouble
            if (side, engine) in cached and not trouble:
                # Under its name only when it is whole, since another comparison may look for it just now.
                draft = cached[side, engine].with_suffix(f".{os.getpid()}.part")
                shutil.copyfile(file, draft)
                draft.replace(cached[side, engine])
            seconds = time.perf_counter() - start
            print(f"{side}, {engine}: {len(found[side, engine][0])} runs in {seconds:.0f} s {trouble}", flush=True)

        begun = [two.submit(one, side, engine) for side, engine in left]
        try:
            for each in begun:
                each.result()
        except BaseException:  # also a signal: players end, so that checkouts can be removed
            two.shutdown(wait=False, cancel_futures=True)
            for process in PLAYERS:
                process.terminate()
            raise
    return found


def read_played(path: Path) -> Played:
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {(line["run"][0], line["run"][1]): line["found"] for line in lines}


def differences(base: dict[str, Any], head: dict[str, Any]) -> list[str]:
    """What differs between two runs, in words.

    A fact that one side has not got is no difference, nor is a field that records have got since.
    """
    found = []
    for name in dict.fromkeys([*base, *head]):
        if name not in base or name not in head:
            added = name in head and name.startswith(("round ", "result.json "))
            if not (added or name.startswith("fact ")):
                there, value = ("HEAD", head[name]) if name in head else ("BASE", base[name])
                found.append(f"{name}: only in {there}" + (f", {_short(value)}" if name == "refusal" else ""))
        elif repr(base[name]) != repr(head[name]):  # as text: NaN equals itself, and 0.0 is not -0.0
            found.append(f"{name}: {how_different(base[name], head[name])}")
    # A side that was refused has left nothing else.
    return [each for each in found if each.startswith("refusal")] or found


def how_different(base: Any, head: Any) -> str:
    """Two values, or for tensors in how many places they differ, and by how much."""
    if not (_is_tensor(base) and _is_tensor(head)):
        return f"{_short(base)} in BASE, {_short(head)} in HEAD"
    if base[:2] != head[:2]:
        return f"{base[0]} {base[1]} in BASE, {head[0]} {head[1]} in HEAD"
    try:
        one, other = (np.frombuffer(base64.b64decode(text), dtype=dtype) for dtype, _, text in (base, head))
    except TypeError:  # a type that numpy has not got
        return "other bits"
    bits = [each.view(np.uint8).reshape(len(each), -1) for each in (one, other)]
    places = int((bits[0] != bits[1]).any(1).sum())
    most = np.abs(one.astype(np.float64) - other.astype(np.float64)).max()
    return f"{places} of {len(one)} numbers differ, by up to {most:.1e}"


def _is_tensor(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and isinstance(value[0], str) and isinstance(value[1], list)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def compare(sides: list[Side], engines: list[str], found: dict[tuple[Side, str], tuple[Played, str]]) -> bool:
    """Print the table and a line for every difference; whether all is equal."""
    lines: list[str] = []
    print(f"\n{'engine':<12}{'equal':>7}{'of them refused':>17}{'different':>11}")
    for engine in engines:
        (base, base_trouble), (head, head_trouble) = (found[side, engine] for side in sides)
        troubles = zip(sides, (base_trouble, head_trouble), strict=True)
        lines += [f"{engine}: {side} {trouble}" for side, trouble in troubles if trouble]
        equal = refused = different = 0
        for run in dict.fromkeys([*base, *head]):
            where = f"{engine}, {run[0]}, {run[1]}"
            if run not in base or run not in head:
                unequal = [f"was played in {sides[run in head]} only"]
            else:
                unequal = differences(base[run], head[run])
            if unequal:
                lines.append(f"{where}: {unequal[0]}" + (f" (and {len(unequal) - 1} more)" if unequal[1:] else ""))
            different += bool(unequal)
            equal += not unequal
            refused += not unequal and "refusal" in base[run]
        if not equal + different:
            lines.append(f"{engine}: nothing was played")
        print(f"{engine:<12}{equal:>7}{refused:>17}{different:>11}")
        said = {
            line for left in (base, head) for run in left.values() for name, line in run.items() if "stderr" in name
        }
        for line in sorted(said):
            print(f"  note: {_short(line)}")
    print("\n".join(["", *lines]) if lines else "\nall equal")
    return not lines


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Play two commits and compare what came out, bit for bit.")
    parser.add_argument("base", metavar="BASE", help="a commit")
    parser.add_argument("head", metavar="HEAD", nargs="?", help="a commit; default: the working tree")
    parser.add_argument(
        "--engines", nargs="+", choices=ENGINES, default=list(ENGINES), metavar="NAME", help=", ".join(ENGINES)
    )
    parser.add_argument("--methods", nargs="+", default=[], metavar="EXPRESSION", help="default: all, variants, pairs")
    parser.add_argument("--quick", action="store_true", help="a few methods in place of all")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="keep what commits left here, for the next time")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the run folders here")
    options = parser.parse_args(arguments)
    if options.quick and not options.methods:
        options.methods = list(QUICK)
    return options


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # an exit removes what was made, a kill not
    try:
        sides = [
            Side("BASE", find_commit(options.base)),
            Side("HEAD", find_commit(options.head) if options.head else None),
        ]
        if options.keep and options.keep.exists() and any(options.keep.iterdir()):
            raise BadInput(f"'{options.keep}' is not empty; give --keep a new folder")
        if options.cache:
            options.cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="same-numbers-") as temporary:
            found = play_all(sides, options, (options.keep or Path(temporary)).resolve())
    except (BadInput, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if compare(sides, options.engines, found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
