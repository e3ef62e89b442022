"""Saved states: whole or not at all, and a damaged or foreign file is never read."""

from __future__ import annotations

import errno
import math
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from fednorm.core.state import digest
from fednorm.errors import CheckpointError, DiskError
from fednorm.halves.messages import Refusal
from fednorm.halves.mine import ClientState, Mine
from fednorm.halves.wire import encode
from fednorm.halves.wire_files import load, load_mine, save, save_mine

HEADER = {"round": 3, "losses": [math.inf, 0.1], "switch": {"k": None}}
TREES = {"model": {"w": torch.arange(3.0)}, "client/3~0": {"w": torch.tensor(2)}, "memory": {}}
MINE = Mine(
    accepted=ClientState(5, {"bn.weight": torch.ones(2)}),
    exchange=4,
    pending=ClientState(6, {"bn.weight": torch.zeros(2)}),
    pending_exchange=5,
)


def saved(path: Path) -> Path:
    save(path, HEADER, TREES)
    return path


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = saved(tmp_path / "state")
    header, trees = load(path)
    assert header == HEADER
    assert {name: digest(tree) for name, tree in trees.items()} == {name: digest(tree) for name, tree in TREES.items()}
    assert os.listdir(tmp_path) == ["state"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.read_bytes()
    assert saved(path).read_bytes() == before
    save(path, {"nan": math.nan}, {})
    assert math.isnan(load(path)[0]["nan"])


def test_no_file_is_no_state(tmp_path: Path) -> None:
    """A client without a file begins as a new one, which the server's next request would notice."""
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "state")
    assert load_mine(tmp_path / "state") == Mine()


def test_cuts_and_altered_bytes_are_noticed(tmp_path: Path) -> None:
    path = saved(tmp_path / "state")
    data = path.read_bytes()
    damaged = [data[:length] for length in range(0, len(data), 7)]
    damaged += [data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :] for at in range(0, len(data), 5)]
    for bad in damaged:
        path.write_bytes(bad)
        with pytest.raises(CheckpointError) as refusal:
            load(path)
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "cannot be read: it has 0 bytes, too few for a message; it was cut on the way; bring back a good copy, "),
        (b"PK\x03\x04" * 30, "cannot be read: it is no message of fednorm's; bring back a good copy, or start anew"),
        (encode(Refusal("no")), "is a message of fednorm's, not a saved state; choose another file"),
    ],
)
def test_a_foreign_file_is_refused(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "state"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as refusal:
        load(path)
    assert str(refusal.value).startswith(f"'{path}' {text}")


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_disk_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    path = saved(tmp_path / "state")

    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(DiskError) as refusal:
            save(path, {}, {})
    free = r" \([\d,]+ bytes are free\)" if number == errno.ENOSPC else ""
    advice = "choose another place" if number == errno.EROFS else "free some space and resume"
    text = re.escape(f"'{path}' cannot be written: {os.strerror(number)}") + free + f"; {advice}"
    assert re.fullmatch(text, str(refusal.value))
    assert load(path)[0] == HEADER
    assert os.listdir(tmp_path) == ["state"]


def test_a_draft_left_by_a_kill_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "state.part").write_bytes(b"half" * 10_000)
    assert load(saved(tmp_path / "state"))[0] == HEADER
    assert os.listdir(tmp_path) == ["state"]


@pytest.mark.parametrize("mine", [Mine(), MINE, MINE.as_of(5)], ids=["new", "pending", "accepted"])
def test_a_clients_state_survives(tmp_path: Path, mine: Mine) -> None:
    path = tmp_path / "mine"
    save_mine(path, mine, terms="t1")
    again = load_mine(path, terms="t1")
    assert (again.exchange, again.pending_exchange) == (mine.exchange, mine.pending_exchange)
    assert again.accepted.steps == mine.accepted.steps
    assert digest(again.accepted.tree) == digest(mine.accepted.tree)
    assert (again.pending is None) == (mine.pending is None)
    if again.pending and mine.pending:
        assert again.pending.steps == mine.pending.steps
        assert digest(again.pending.tree) == digest(mine.pending.tree)
    assert load_mine(path).exchange == mine.exchange


def test_a_clients_state_of_another_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine"
    save_mine(path, MINE, terms="t1")
    with pytest.raises(CheckpointError) as refusal:
        load_mine(path, terms="t2")
    assert str(refusal.value) == f"'{path}' is a client's state of another run; choose another file for this one"


def test_another_state_is_no_clients(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refusal:
        load_mine(saved(tmp_path / "state"))
    assert str(refusal.value) == f"'{tmp_path / 'state'}' is not the state of a client; choose another file"
