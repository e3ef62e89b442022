"""Put one small mistake after the other into a copy of the package, and see which of them the tests notice.

python tools/mutants.py map [TEST FILE ...]         which tests run which functions; once, and after tests have changed
python tools/mutants.py run [--number N] [--seed S] [--in PATH ...] [--jobs J]
python tools/mutants.py show                        what came out, and survivors that tests/mutants.toml does not know

A mutant is tried by tests that run its function, the quickest first, for some seconds. All is kept in `.mutants/` line
by line, so that either command goes on where it was ended. `run --again` tries survivors once more, with more tests.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from mutants_player import FAST, Chosen, Playing, Watcher
from mutations import MODULE, Mutant, mutants

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / ".mutants"
SOURCE = "src/fednorm"
VERDICTS = ROOT / "tests/mutants.toml"
ROOMS = ("core", "pieces", "layers", "methods", "halves", "running/store.py", "engines", "scoring", "data")
ASIDE = ("engines/stack/kernels/",)
"""Kernels run on a GPU or in Triton's interpreter; tests/test_kernels.py is theirs."""
ELSEWHERE = {
    "engines/ranks.py": "tests/test_ranks.py",
    "engines/workers.py": "tests/test_workers.py",
    "engines/worker_messages.py": "tests/test_workers.py",
}
"""What runs in processes that tests start, where the map does not see it."""
Task = tuple[Path, Playing, Callable[[int | None, float], None]]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def note(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def copies(what: str, count: int) -> list[Path]:
    """Fresh copies of what git knows of the working tree: the tree itself is never touched."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, check=True, text=True).stdout.split("\0")  # noqa: S603
    trees = [WORK / f"{what}-{number}" for number in range(count)]
    for tree in trees:
        shutil.rmtree(tree, ignore_errors=True)
        for name in (each for each in listed if (ROOT / each).is_file()):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    return trees


def side_by_side(trees: Sequence[Path], begin: Iterator[Callable[[Path], Task]]) -> None:
    """Have as many tasks under way as there are trees, until there are no more."""
    for name in filter(lambda each: importlib.util.find_spec(each.split(".")[0]), FAST):
        importlib.import_module(name)
    free, busy = list(trees), list[Task]()
    try:
        while True:
            while free and (start := next(begin, None)):
                busy.append(start(free.pop()))
            if not busy:
                return
            for task in list(busy):
                tree, playing, done = task
                if result := playing.result():
                    done(*result)
                    busy.remove(task)
                    free.append(tree)
            time.sleep(0.02)
    finally:
        for _, playing, _ in busy:
            playing.end()


def make_map(files: Sequence[str], jobs: int) -> None:
    """Run test files one by one and take down what each of their tests runs."""
    tests = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
    wanted = list(files) or [*tests, SOURCE]
    known = {row["file"]: row["sha"] for row in lines(WORK / "map.jsonl")}

    def sha(name: str) -> str:
        return "" if (ROOT / name).is_dir() else hashlib.sha256((ROOT / name).read_bytes()).hexdigest()

    def begin(name: str) -> Callable[[Path], Task]:
        def start(tree: Path) -> Task:
            playing = Playing(tree, [name], Watcher(tree / SOURCE, WORK / f"{tree.name}.json"), limit=3600)

            def done(code: int | None, seconds: float) -> None:
                found = playing.news()
                note(WORK / "map.jsonl", {"file": name, "sha": sha(name), "tests": found})
                print(f"{name}: {len(found)} tests, {seconds:.0f} s, exit code {code}", flush=True)

            return tree, playing, done

        return start

    side_by_side(copies("map", jobs), (begin(name) for name in wanted if known.get(name) != sha(name)))


def read_map() -> dict[str, dict[str, float]]:
    """The tests of each function, and of each file as `FILE::<module>`, with their seconds."""
    newest = {test: seen for row in lines(WORK / "map.jsonl") for test, seen in row["tests"].items()}
    found: dict[str, dict[str, float]] = {}
    for test, (seconds, functions) in newest.items():
        away = [f"{name}::{MODULE}" for name, file in ELSEWHERE.items() if test.startswith(f"{file}::")]
        for function in [*functions, *away]:
            for place in (function, f"{function.split('::')[0]}::{MODULE}"):
                found.setdefault(place, {})[test] = seconds
    return found


def related(mutant: Mutant, tests: dict[str, dict[str, float]], seconds: float) -> list[str]:
    """Tests that run the function of a mutant, the quickest first, as many as fit into some seconds.

    What is in no function, such as a default or a table, is the business of all who run something of the file, or of
    those that import it.
    """
    name = mutant.file.removeprefix(f"{SOURCE}/")
    own = tests.get(f"{name}::{mutant.function}", {})
    if mutant.function == MODULE or name in ELSEWHERE or not own:
        own = {
            test: seconds
            for file in (name, *importers(name))
            for test, seconds in tests.get(f"{file}::{MODULE}", {}).items()
        }
    chosen, total = [], 0.0
    for test in sorted(own, key=lambda each: own[each]):
        if total + own[test] > seconds and len(chosen) >= 3:
            break
        chosen.append(test)
        total += own[test]
    return chosen


@cache
def importers(name: str) -> list[str]:
    """Files of the package that import one of them."""
    module = re.compile(rf"\bfednorm\.{name.removesuffix('.py').replace('/', '.')}\b")
    files = sorted((ROOT / SOURCE).rglob("*.py"))
    return [str(file.relative_to(ROOT / SOURCE)) for file in files if module.search(file.read_text())]


def draw(rooms: Sequence[str], number: int, seed: int) -> list[Mutant]:
    """As many mutants of each room, drawn by the seed."""
    hands: list[list[Mutant]] = []
    for room in rooms:
        path = ROOT / SOURCE / room
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        names = [str(file.relative_to(ROOT / SOURCE)) for file in files]
        kept = [name for name in names if not name.startswith(ASIDE)]
        hand = [each for name in kept for each in mutants(f"{SOURCE}/{name}", (ROOT / SOURCE / name).read_bytes())]
        # By a digest of each: one more function elsewhere does not change what else is drawn.
        hands.append(sorted(hand, key=lambda each: hashlib.sha256(f"{seed} {each.id}".encode()).digest()))
    taken = [hand[place] for place in range(max(map(len, hands))) for hand in hands if place < len(hand)]
    return taken[:number]


def run(drawn: Sequence[Mutant], jobs: int, seconds: float, limit: float, again: bool) -> None:
    """Try mutants that were not tried yet; or, again, those that have survived."""
    tests, results = read_map(), WORK / "results.jsonl"
    before = {row["id"]: row["outcome"] for row in lines(results)}
    open_ones = {id for id, outcome in before.items() if outcome in ("survived", "no test")} - verdicts().keys()
    left = [m for m in drawn if (m.id in open_ones if again else m.id not in before)]
    print(f"{len(left)} of {len(drawn)} mutants to try", flush=True)

    def begin(mutant: Mutant) -> Callable[[Path], Task]:
        chosen = related(mutant, tests, seconds)

        def start(tree: Path) -> Task:
            path = tree / mutant.file
            original = path.read_bytes()
            rewrite(path, mutant.applied(original))
            files = list(dict.fromkeys(test.split("::")[0] for test in chosen))
            playing = Playing(tree, files or ["tests/tiny.py"], Chosen(chosen, WORK / f"{tree.name}.json"), limit)

            def done(code: int | None, took: float) -> None:
                rewrite(path, original)
                outcome = {0: "survived", 5: "no test", None: "timeout"}.get(code, "killed")
                row = {"id": mutant.id, "outcome": outcome, "tests": len(chosen), "seconds": took, **playing.news()}
                note(results, {**row, **{k: v for k, v in asdict(mutant).items() if k not in ("start", "end")}})
                print(f"{outcome:9} {took:5.1f} s  line {mutant.line:<4} {mutant.id[:160]}", flush=True)

            return tree, playing, done

        return start

    side_by_side(copies("run", jobs), (begin(mutant) for mutant in left))


def rewrite(path: Path, content: bytes) -> None:
    """Another content, and nothing compiled from the one before."""
    path.write_bytes(content)
    Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)


def verdicts() -> dict[str, str]:
    """What was found out about survivors, by hand."""
    return {each["id"]: each["verdict"] for each in tomllib.loads(VERDICTS.read_text())["survivor"]}


def show(drawn: Sequence[Mutant]) -> int:
    """Outcomes by room, and survivors without a verdict; 1 if there are such."""
    settled = verdicts()
    newest = {row["id"]: row for row in lines(WORK / "results.jsonl")}
    rows = [newest[each.id] for each in drawn if each.id in newest]
    table: dict[str, Counter[str]] = {}
    for row in rows:
        survived = row["outcome"] in ("survived", "no test")
        outcome = settled.get(row["id"], row["outcome"]) if survived else row["outcome"]
        for name in (row["file"].removeprefix(f"{SOURCE}/").split("/")[0], "all"):
            table.setdefault(name, Counter())[outcome] += 1
    for name, counts in sorted(table.items()):
        caught = sum(count for outcome, count in counts.items() if outcome in ("killed", "timeout", "tested"))
        real = sum(counts.values()) - counts["equivalent"]
        print(f"{name:10} {caught} of {real} noticed ({100 * caught / max(1, real):.0f} %)  {dict(counts)}")
    open_ones = [row for row in rows if row["outcome"] in ("survived", "no test") and row["id"] not in settled]
    for row in open_ones:
        print(f"{row['outcome']} {row['tests']} tests, {row['file']}:{row['line']}\n  {row['id']}")
    return int(bool(open_ones))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("map", "run", "show"))
    parser.add_argument("files", nargs="*", help="test files to map; all by default")
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--in", dest="rooms", nargs="+", default=list(ROOMS), help="rooms or files of the package")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=15.0, help="of tests for a mutant, as the map measured them")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds after which a mutant counts as noticed")
    parser.add_argument("--again", action="store_true", help="try survivors again")
    given = parser.parse_intermixed_args()
    WORK.mkdir(exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if given.what == "map":
        make_map(given.files, given.jobs)
        return 0
    drawn = draw(given.rooms, given.number, given.seed)
    if given.what == "run":
        run(drawn, given.jobs, given.seconds, given.limit, given.again)
    return show(drawn)


if __name__ == "__main__":
    sys.exit(main())
