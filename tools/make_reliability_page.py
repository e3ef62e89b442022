"""Write docs/reliability.md: what is promised for every fault, which tests play it, and counts of flips and of fuzz.

Tests say which row they play with `@pytest.mark.fault(row=N)`; a row that none plays is shown as a gap.
"""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE, TESTS, COUNTS = ROOT / "docs" / "reliability.md", ROOT / "tests", ROOT / "docs" / "reliability_counts.json"
HEAD = """# Reliability

This page is written by `make docs` from the marks of the tests and from `docs/reliability_counts.json`.

What is promised: a run is a function of its config and its data, also when it is stopped and resumed. A round is
committed whole or not at all. A bad update costs one client, never the model. Bytes from outside run no code and cost
no more than a set bound. Every fault ends in a row that says so, or in one line and an [exit code](cli.md).

Digests find damage, edits and mix-ups. They are no signatures: whoever may write a run's folder can also write digests
that fit. [SECURITY.md](../SECURITY.md) says whom fednorm trusts.

## Faults

Each row is played by the tests named; rows without one are gaps.

"""
STORED = """\
## What a run's files are checked for

| file | check | when |
|---|---|---|
| `state.sqlite` | SQLite's own check of the whole file; its tables; a seal over every fact, tree, layout, client and \
round; the digest of each row that is read | when it is opened, once, and when a row is read |
| `config.json` | a digest over itself; the config in the state | whenever it is read |
| `result.json` | a digest over itself, and of the config and the state it was made from | when it is read; in a \
comparison also against the rows and the model in the state |
| `*.safetensors` | a digest over all tensors and metadata | by `--init` |

A folder of a version without these digests is opened: its state gets a seal once SQLite's own check was right (that a
row was lost before then cannot be seen), its config is compared with its state, a result without a digest is noted,
and in a comparison computed anew.
A state file that is empty or gone is refused once the run had begun.

"""


class Row(NamedTuple):
    """A fault and what is promised."""

    fault: str
    promise: str
    gap: str = ""
    """why no test plays it, where that is known"""


ROWS = {
    1: Row("a client dies before it has trained", "the round closes with the others while the quorum holds"),
    2: Row("a client dies after it has trained, before it sends", "as 1; its own state is as before the round"),
    3: Row("a client dies after the server merged", "the round stands; the client goes on from it when it is back"),
    4: Row("a client is too slow", "it is left out; what it sends later is refused"),
    5: Row("fewer clients than the quorum", "the round is void, tried again, then exit 4; nothing has changed"),
    6: Row("NaN or infinity anywhere in an update", "the client is refused, the tensor named; the server stays finite"),
    7: Row("wrong shape, type, missing or further tensors", "the client is refused, with what was expected"),
    8: Row("negative variances, impossible counters", "the client is refused"),
    9: Row("an impossible number of examples", "the client is refused"),
    10: Row("an update twice, of an earlier round, by another client", "the second is refused and weighs nothing"),
    11: Row(
        "clients that want to do harm",
        "an update far above the others' norm is refused",
        "merges that withstand many of them (median, trimmed mean, Krum) do not exist yet",
    ),
    12: Row("NaN in the data of a client", "its update is refused, its own state is as before"),
    13: Row("batches of one, constant inputs, clients without data", "skipped, or refused by name before the run"),
    14: Row("training that diverges on one client", "as 6; the others go on"),
    15: Row("a state file that is cut off", "refused, or the commit before; never read in part"),
    16: Row("bits that flip, rows that are lost, exchanged or forged", "refused in one line; never read otherwise"),
    17: Row("a full disk", "exit 5 with the bytes that are free; the last commit is whole, and resume goes on from it"),
    18: Row("the process is killed", "resume gives the bits of a run that was not"),
    19: Row("Ctrl-C, SIGTERM", "the round ends, exit 130 or 143, and the line that resumes"),
    20: Row("two processes in one folder", "the second exits 6 and names the first; a lock dies with its process"),
    21: Row("the clock jumps", "nothing depends on the time of day", "there are no deadlines yet"),
    22: Row("the config is changed before a resume", "refused, with the fields that differ"),
    23: Row("a state of an older or a newer version", "older: brought up, same results; newer: refused by number"),
    24: Row("pickles, zips and objects in the place of data", "never opened as such; no code runs"),
    25: Row("names of clients that play with paths", "nothing outside the folder is touched"),
    26: Row("messages that promise too much", "refused before they cost memory"),
    27: Row("a client runs out of memory", "as 1"),
    28: Row(
        "processes of NVFlare or Flower are killed",
        "as 1, 5 and 18",
        "there are no adapters for them yet",
    ),
    29: Row(
        "no TLS, unknown keys, unsigned jobs",
        "refused outside this machine",
        "there are no adapters for them yet; fednorm opens no port itself",
    ),
    30: Row("an observer fails", "one warning; the run is unchanged"),
}


def marked() -> dict[int, list[str]]:
    """The tests that play each row, by file and name."""
    found: defaultdict[int, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                for row in _rows(node):
                    found[row].append(f"{path.relative_to(ROOT)}::{node.name}")
    unknown = found.keys() - ROWS.keys()
    if unknown:
        raise SystemExit(f"tests play rows {sorted(unknown)}, which the matrix does not have")
    return dict(found)


def _rows(function: ast.FunctionDef) -> Iterator[int]:
    """The rows in a test's marks."""
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.fault":
            for value in (*decorator.args, *(keyword.value for keyword in decorator.keywords)):
                if isinstance(value, ast.Constant) and isinstance(value.value, int):
                    yield value.value


def page() -> str:
    """docs/reliability.md."""
    counts = json.loads(COUNTS.read_text())
    return HEAD + _matrix(marked()) + "\n" + STORED + _flips(counts["flips"]) + "\n" + _fuzz(counts["fuzz"])


def _matrix(tests: Mapping[int, list[str]]) -> str:
    lines = ["| # | fault | what is promised | tests |", "|---|---|---|---|"]
    for number, row in ROWS.items():
        named = tests.get(number, [])
        cell = "<br>".join(f"`{name.removeprefix('tests/')}`" for name in named) or "**gap**: no test"
        cell += f"; {row.gap}" if row.gap else ""
        lines.append(f"| {number} | {row.fault} | {row.promise} | {cell} |")
    played = sum(number in tests for number in ROWS)
    return "\n".join([*lines, "", f"{played} of {len(ROWS)} rows are played by tests."]) + "\n"


def _flips(found: Mapping[str, Any]) -> str:
    rows = [
        f"| `{name}` | {each['cases']:,} | {_of(each, 'refused')} | {_of(each, 'read right')} | {_of(each, 'silent')} "
        f"| {_of(each, 'untyped')} |"
        for name, each in found.items()
    ]
    total = sum(each["cases"] for each in found.values())
    return f"""## Flipped bits

One bit at a time in the files of a run with best clients put aside; in the store half of them aimed at its structure. A
store that still reads right takes another round, is opened again, and must hold just that. Bits that nothing uses are
read right.

| file | flips | refused | read right | silent | untyped |
|---|---|---|---|---|---|
{chr(10).join(rows)}

{total:,} flips in all. {_made(found)}
"""


def _fuzz(found: Mapping[str, Any]) -> str:
    rows = []
    for name, each in sorted(found.items()):
        typed = ", ".join(
            f"{count:,} {kind}" for kind, count in each["outcomes"].items() if kind not in ("read", "untyped")
        )
        rows.append(f"| {name} | {each['cases']:,} | {_of(each, 'read')} | {typed} | {_of(each, 'untyped')} |")
    total = sum(each["cases"] for each in found.values())
    return f"""## Fuzz

Mutations of good files by bits, bytes, pieces and words, for everything that reads what others wrote. A case is untyped
when it ends in any other error than fednorm's own, takes 10 seconds or more, or 4 GiB.

| target | cases | read | refused | untyped |
|---|---|---|---|---|
{chr(10).join(rows)}

{total:,} cases in all. {_made(found)} `tests/faults/test_fuzz.py` plays a small share of others with every test run.
"""


def _of(each: Mapping[str, Any], outcome: str) -> str:
    return f"{each['outcomes'].get(outcome, 0):,}"


def _made(found: Mapping[str, Any]) -> str:
    """With what counts were made."""
    told = dict.fromkeys(
        f"`{each['command']}` on {each['date']} with Python {each['versions']['python']}, torch "
        f"{each['versions']['torch']}, SQLite {each['versions']['sqlite']}."
        for each in found.values()
    )
    return " ".join(told)


if __name__ == "__main__":
    PAGE.write_text(page())
