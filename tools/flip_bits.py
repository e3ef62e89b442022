"""Flip bits in the files of a run, one at a time, and count what becomes of them: none may change what is read.

    python tools/flip_bits.py --cases 50000 --record

Half of the flips in the store are aimed at its structure: the file's header, page headers, lists of cells, the first
bytes of cells and of pages that go on elsewhere. A store that still reads right then takes one more round, is opened
again and must hold just that.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from counting import outcome, record

import fednorm
from fednorm.core.state import digest
from fednorm.halves.mine import ClientState
from fednorm.running.folder import RunFolder
from fednorm.running.given import config_in, read_stored
from fednorm.running.records import RunId
from fednorm.running.result_file import result_of
from fednorm.running.store import Store
from fednorm.running.tensor_files import load_tree

SHARES = {"state.sqlite": 0.8, "config.json": 0.06, "result.json": 0.07, "model.safetensors": 0.07}
ROUNDS = 3


def made_run(place: Path) -> RunFolder:
    """A run of a method that keeps state of clients, with a best round put aside."""
    settings: dict[str, Any] = {"rounds": ROUNDS, "local_steps": 1, "engine.threads": 1, "data.train_limit": 120}
    settings |= {"model": "mlp_bn(width=8)", "data.val_fraction": 0.2, "keep": "best", "engine.device": "cpu"}
    fednorm.run(method="fedbn", out=place / "run", **settings)
    return RunFolder(place / "run")


def all_of(store: Store) -> list[Any]:
    """Everything that a store holds."""
    best = store.of_best()
    return [
        store.facts(),
        {name: digest(store.tree(name)) for name in ("model", "memory", "best")},
        list(store.rows()),
        {client: (each.steps, digest(each.tree)) for client, each in store.get_many(store.seen()).items()},
        {client: (each.steps, digest(each.tree)) for client, each in best.get_many(best.seen()).items()},
    ]


def one_more_round(store: Store) -> None:
    row = {**list(store.rows())[-1], "round": ROUNDS + 1}
    for client in (1, 3, 99):
        store.put(client, ClientState(7, {**store.get(1).tree}))
    store.commit(ROUNDS + 1, {"model": {"w": torch.arange(900.0)}}, {"stage": 5}, [row], best=True)


def read_and_go_on(path: Path) -> list[Any]:
    """What a store holds, and what it holds after another round."""
    with closing(Store(path, begun=True)) as store:
        before = all_of(store)
        one_more_round(store)
    with closing(Store(path, begun=True)) as store:
        return [before, all_of(store)]


def structure(data: bytes) -> list[int]:
    """Places in an SQLite file that say where things are (https://www.sqlite.org/fileformat2.html)."""
    size = int.from_bytes(data[16:18], "big")
    size = 65536 if size == 1 else size
    found = list(range(100))
    for start in range(0, len(data), size):
        head = start + 100 * (start == 0)
        found += range(head, head + 12)
        if data[head] not in (2, 5, 10, 13):
            continue
        cells = int.from_bytes(data[head + 3 : head + 5], "big")
        pointers = head + (12 if data[head] in (2, 5) else 8)
        found += range(pointers, pointers + 2 * cells)
        for number in range(cells):
            at = start + int.from_bytes(data[pointers + 2 * number : pointers + 2 * number + 2], "big")
            found += range(at, at + 24)
    return [place for place in found if place < len(data)]


def flipped(data: bytes, place: int, bit: int) -> bytes:
    changed = bytearray(data)
    changed[place] ^= 1 << bit
    return bytes(changed)


def flip_store(folder: RunFolder, place: Path, cases: int, draw: random.Random) -> Counter[str]:
    data = folder.state.read_bytes()
    aimed = structure(data)
    copy = place / "state.sqlite"
    copy.write_bytes(data)
    expected = read_and_go_on(copy)
    found: Counter[str] = Counter()
    for number in range(cases):
        at = draw.choice(aimed) if number % 2 else draw.randrange(len(data))
        for old in place.glob("state.sqlite*"):
            old.unlink()
        bit = draw.randrange(8)
        copy.write_bytes(flipped(data, at, bit))
        what, error = outcome(lambda: read_and_go_on(copy), expected)
        found[what] += 1
        if what in ("silent", "untyped"):
            print(f"state.sqlite: byte {at}, bit {bit}: {what} {error}")
    return found


def flip_file(folder: RunFolder, name: str, cases: int, draw: random.Random) -> Counter[str]:
    path = folder.path / name
    data, read = path.read_bytes(), READERS[name]
    expected = read(folder)
    found: Counter[str] = Counter()
    for _ in range(cases):
        at, bit = draw.randrange(len(data)), draw.randrange(8)
        path.write_bytes(flipped(data, at, bit))
        what, error = outcome(lambda: read(folder), expected)
        found[what] += 1
        if what in ("silent", "untyped"):
            print(f"{name}: byte {at}, bit {bit}: {what} {error}")
    path.write_bytes(data)
    return found


def _read_config(folder: RunFolder) -> Any:
    stored = read_stored(folder)
    return config_in(stored), stored


def _read_result(folder: RunFolder) -> Any:
    return result_of(folder, RunId("fedbn", 0), config_in(read_stored(folder)))


READERS: dict[str, Callable[[RunFolder], Any]] = {
    "config.json": _read_config,
    "result.json": _read_result,
    "model.safetensors": lambda folder: digest(load_tree(folder.model)),
}


def flip_all(place: Path, cases: int, seed: int) -> dict[str, Counter[str]]:
    """The outcomes of so many flips, by file."""
    folder = made_run(place)
    aside = place / "aside"
    aside.mkdir()
    counts = {}
    for name, share in SHARES.items():
        draw = random.Random(f"{seed} {name}")  # noqa: S311 (which bits, not a secret)
        number = round(cases * share)
        is_store = name == "state.sqlite"
        counts[name] = flip_store(folder, aside, number, draw) if is_store else flip_file(folder, name, number, draw)
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true", help="keep the counts for docs/reliability.md")
    asked = parser.parse_args(arguments)
    place = Path(tempfile.mkdtemp(prefix="flips-"))
    try:
        counts = flip_all(place, asked.cases, asked.seed)
    finally:
        shutil.rmtree(place)
    for name, found in counts.items():
        print(f"{name}: {dict(found)}")
    if asked.record:
        command = f"python tools/flip_bits.py --cases {asked.cases} --seed {asked.seed}"
        record("flips", command, counts)
    return int(any(found["silent"] or found["untyped"] for found in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
