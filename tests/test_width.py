"""What is printed in a terminal of 80 columns: no longer line, no broken word, and what was left out is named."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from command import TINY, fednorm
from fednorm.cli.output import print_scores
from fednorm.cli.table import Table, fitted, wrapped
from fednorm.running.results import Result

NARROW = 80


def words(text: str) -> set[str]:
    """Words and names as they are, without what may stand around them."""
    return {word.strip("().,;:`'\"") for word in text.split()}


LISTINGS = (
    "methods",
    "methods fixbn(at=0.5)+fedprox+local-momentum",
    "models",
    "datasets",
    "inspect resnet18 --method fixbn+local-momentum",
    "inspect mobilenet_v2 --method hbn",
    "data info fashion_mnist_small",
)


@pytest.mark.parametrize("line", LISTINGS)
def test_a_narrow_terminal_gets_whole_words(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    wide = fednorm(*line.split()).out
    monkeypatch.setenv("COLUMNS", str(NARROW))
    narrow = fednorm(*line.split()).out
    assert max(map(len, narrow.splitlines())) <= NARROW
    known = words(wide) | words("left out in 80 columns a wider window pipe or --json has them")
    broken = {word for word in words(narrow) - known if not any(word in whole for whole in joints(wide))}
    assert broken == set()


def joints(text: str) -> set[str]:
    """Words that may be broken: after a + of a method, and before a name in a tensor's key."""
    return {word for word in text.split() if "+" in word or re.search(r"\.[A-Za-z_]", word)}


def test_columns_without_room_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(NARROW))
    shown = fednorm("methods").out
    assert shown.splitlines()[0].split() == ["method", "what", "it", "does", "bytes"]
    left = "left out in 80 columns: paper, needs, exchanges, stays local; a wider window, a pipe or --json has them"
    assert left in " ".join(shown.split())
    monkeypatch.delenv("COLUMNS")
    piped = fednorm("methods").out
    assert "left out" not in piped
    assert piped.splitlines()[0].split()[-1] == "paper"


def test_a_pipe_has_no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    shown = fednorm("methods").out.splitlines()
    assert len([line for line in shown if line.startswith("fixbn ")]) == 1
    assert all(line.startswith("fix") or "fixbn" not in line.split() for line in shown)


def test_a_real_terminal_is_asked_for_its_width() -> None:
    ours, theirs = pty.openpty()
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    code = (
        "import fcntl, struct, sys, termios; fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack('HHHH', 24, 60, 0, 0)); "
        "from fednorm.cli import exit_code; sys.exit(exit_code(['datasets']))"
    )
    with os.fdopen(ours, "rb", buffering=0) as screen:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=theirs, env=env)
        os.close(theirs)
        seen = b""
        while chunk := read(screen.fileno()):
            seen += chunk
        assert process.wait(60) == 0
    lines = re.sub(r"\x1b\[[\d;]*m", "", seen.decode()).splitlines()
    assert lines[0].split()[:2] == ["data", "set"]
    assert max(map(len, lines)) <= 60


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # so a terminal says that nobody writes to it any more
        return b""


def scored(method: str) -> Any:
    scores = {"accuracy": 49.6}
    final = {"pooled": {**scores, "how": "averaged local state"}, "own_client": scores, "unseen": scores}
    return {
        "method": method,
        "seed": 0,
        "metric": "accuracy",
        "final": final,
        "curves": {},
        "bytes": {"per_round": 806_600},
        "seconds": 1.0,
    }


def test_scores_of_methods_with_long_names(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", str(NARROW))
    runs = [scored("fixbn(at=0.5,statistics=true)+local-momentum+fedprox(mu=0.01)"), scored("fedavg")]
    print_scores(Result(tuple(runs + [{**run, "seed": 1} for run in runs])))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= NARROW
    begins = [line[:31].split() for line in shown.splitlines()[2:6]]  # below a heading of two lines
    assert begins == [["fixbn(at=0.5,statistics=true)+"], ["local-momentum+"], ["fedprox(mu=0.01)"], ["fedavg"]]
    assert "49.6 ± 0.0*" in shown


def test_a_comparison_is_narrow_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(NARROW))
    monkeypatch.chdir(tmp_path)
    done = fednorm("compare", "fedavg", "fixbn", *TINY, "--out", "both", "--quiet")
    assert done.code == 0, done.err
    assert max(map(len, done.out.splitlines())) <= NARROW


def test_columns_give_way_in_order() -> None:
    table = Table(["a", "text", "n"], [["x" * 10, "five words of some length", "123"]], ["n"], ["n"])
    assert fitted(table, None).body == [f"{'x' * 10}  five words of some length  123"]
    assert fitted(table, 37).body == [f"{'x' * 10}  five words of some    123", f"{'':12}length"]
    narrow = fitted(table, 36)
    assert (narrow.left_out, narrow.body) == (["n"], [f"{'x' * 10}  five words of some", f"{'':12}length"])
    assert max(map(len, fitted(table, 20).body)) == 20  # less than readable, since nothing else is left


def test_a_word_that_is_too_long_stays_whole() -> None:
    assert wrapped("see /a/very/long/path/that/cannot/be/broken now", 20) == [
        "see",
        "/a/very/long/path/that/cannot/be/broken",
        "now",
    ]
    assert wrapped("  name: a text that goes on", 16, "  ") == ["  name: a text", "    that goes on"]
