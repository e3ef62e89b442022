"""A full disk, for real: exit code 5, one line, nothing half-written, and the run goes on once there is space."""

from __future__ import annotations

import contextlib
import errno
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import tiny
from command import TINY, fednorm
from fednorm.errors import ConfigError, DiskError
from fednorm.files import disk_errors, draft_of, write_json, written_whole
from fednorm.running.folder import RunFolder
from fednorm.running.tensor_files import save_tree

TOO_LARGE = "cannot be written: File too large; free some space and resume"


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """The system refuses to write a file beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert fednorm("run", *TINY, "--out", folder, "--quiet").code == 0
    return folder


@pytest.mark.fault(row=17)
@pytest.mark.parametrize("name", ["result.json", "metrics.jsonl"])
def test_a_text_file_of_a_run(ended: Path, name: str) -> None:
    before = (ended / name).read_text()
    rows = [json.loads(line) for line in (ended / "metrics.jsonl").read_text().splitlines()]

    def write() -> None:
        if name == "result.json":
            write_json(ended / name, json.loads(before))
        else:
            with RunFolder(ended).metrics_open(rows):
                pass

    with files_up_to(len(before) - 1), pytest.raises(DiskError) as refusal:
        write()
    assert (str(refusal.value), refusal.value.exit_code) == (f"'{ended / name}' {TOO_LARGE}", 5)
    assert (ended / name).read_text() == before
    assert not draft_of(ended / name).exists()
    assert fednorm("resume", ended, "--quiet").code == 0


@pytest.mark.fault(row=17)
def test_the_config_of_a_run(ended: Path, tmp_path: Path) -> None:
    with files_up_to((ended / "config.json").stat().st_size - 1):
        done = fednorm("run", *TINY, "--out", tmp_path)
    assert (done.code, done.err) == (5, f"error: '{tmp_path / 'config.json'}' {TOO_LARGE}\n")
    assert [each.name for each in tmp_path.iterdir()] == ["env.json"]


# Larger than what SQLite keeps beside the state, smaller than the model.
_BELOW_THE_MODEL = 40_000


@pytest.mark.fault(row=17)
def test_the_model(ended: Path) -> None:
    before = (ended / "model.safetensors").read_bytes()
    assert len(before) > _BELOW_THE_MODEL
    with files_up_to(_BELOW_THE_MODEL):
        done = fednorm("resume", ended, "--quiet")
    assert (done.code, done.err) == (5, f"error: '{ended / 'model.safetensors'}' {TOO_LARGE}\n")
    assert (ended / "model.safetensors").read_bytes() == before


@pytest.mark.fault(row=17)
def test_an_export(ended: Path, tmp_path: Path) -> None:
    target = tmp_path / "sub" / "model.safetensors"
    with files_up_to(_BELOW_THE_MODEL):
        done = fednorm("export", ended, "-o", target)
    assert (done.code, done.err) == (5, f"error: '{target}' {TOO_LARGE}\n")
    assert list(target.parent.iterdir()) == []
    (tmp_path / "file").write_text("")
    misplaced = fednorm("export", ended, "-o", tmp_path / "file" / "model.safetensors")
    assert (misplaced.code, "choose another place" in misplaced.err) == (2, True)


@pytest.mark.fault(row=17)
def test_a_row_of_a_round(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    rows = [tiny.row(number) for number in (1, 2, 3)]
    with folder.metrics_open(rows[:1]) as add:
        add(rows[1])
        size = folder.metrics.stat().st_size
        with files_up_to(size + 5), pytest.raises(DiskError, match=r"metrics.jsonl' cannot be written: File too large"):
            add(rows[2])
    with folder.metrics_open(rows[:2]) as add:
        add(rows[2])
    assert [json.loads(line) for line in folder.metrics.read_text().splitlines()] == rows


def test_tensors_that_cannot_be_written_for_another_reason_are_no_disk_error(tmp_path: Path) -> None:
    shared = torch.zeros(3)
    with pytest.raises(RuntimeError, match="share memory"):
        save_tree(tmp_path / "m", {"a": shared, "b": shared}, {})
    with pytest.raises(ConfigError, match=r"choose another place$"):
        save_tree(tmp_path / "no" / "m", {"a": shared}, {})
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    with contextlib.suppress(KeyError), written_whole(path) as draft:
        draft.write_text("half")
        raise KeyError
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]
    assert json.loads(path.read_text()) == {"a": 1}


def test_an_error_that_is_not_the_disks_passes(tmp_path: Path) -> None:
    with pytest.raises(ConnectionResetError), disk_errors(tmp_path):
        raise ConnectionResetError(errno.ECONNRESET, "gone")
    with pytest.raises(FileNotFoundError), RunFolder(tmp_path).locked():
        (tmp_path / "data of a user").read_text()
