"""A disk that is full while a run commits: exit code 5, the last commit is whole, and the run goes on later."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

from command import TINY, fednorm
from fednorm.errors import DiskError
from fednorm.halves.mine import ClientState
from fednorm.running.store import Store

RUN = (*TINY[:-4], "--method", "fedbn", "--rounds", "6", "--local-steps", "1", "--set", "engine.checkpoint_every=1")


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """The system refuses to write a file beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.fault(row=17)
def test_a_commit_that_does_not_fit_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "s"
    store = Store(path)
    store.put(1, ClientState(1, {"a": torch.ones(8)}))
    store.commit(1, {"model": {"w": torch.ones(4)}}, {}, [{"round": 1}])
    store.put(1, ClientState(2, {"a": torch.zeros(8)}))
    big = {"w": torch.ones(1 << 20)}
    with files_up_to(1 << 20), pytest.raises(DiskError) as refusal:
        store.commit(2, {"model": big}, {}, [{"round": 2}])
    said = str(refusal.value)
    assert re.fullmatch(
        rf"{path} cannot be written: .*4,194,344 bytes are to be written, [\d,]+ bytes are free\); free some space and "
        "resume",
        said,
    ), said
    store.close()
    with closing(Store(path)) as again:
        assert (again.facts()["round"], again.get(1).steps, again.tree("model")["w"].numel()) == (1, 1, 4)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MB, where the tests may make one."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a disk of its own takes the right to mount one")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.fault(row=17)
@pytest.mark.slow
@pytest.mark.parametrize("left", [60_000, 250_000])
def test_a_full_disk_ends_a_run_that_goes_on_once_there_is_space(small_disk: Path, tmp_path: Path, left: int) -> None:
    whole = fednorm("run", *RUN, "--out", tmp_path / "whole", "--json", "--quiet").json
    ballast = small_disk / "ballast"
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    ballast.write_bytes(bytes(free - left))
    folder = small_disk / "run"
    full = fednorm("run", *RUN, "--out", folder, "--quiet")
    assert (full.code, full.err.count("\n")) == (5, 1), full
    assert re.search(r"cannot be written: .*bytes are free\); free some space and resume\n$", full.err), full.err
    ballast.unlink()
    verb = ("resume", folder) if (folder / "config.json").exists() else ("run", *RUN, "--out", folder)
    again = fednorm(*verb, "--json", "--quiet")
    assert again.code == 0, again.err
    assert again.json["runs"][0]["digest"] == whole["runs"][0]["digest"]
