"""Run folders, data folders and archives of others: links lead nowhere, lists stay inside, text does nothing."""

from __future__ import annotations

import ast
import io
import json
import os
import shutil
import stat
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import tiny
from command import TINY, fednorm
from fednorm import cli
from fednorm.data import load_dataset
from fednorm.data.archives import unpack
from fednorm.data.fetch import fetch, md5_of
from fednorm.data.sources import Download
from fednorm.errors import CheckpointError, ConfigError, visible
from fednorm.files import draft_of, write_json
from fednorm.running.folder import RunFolder
from fednorm.running.progress import done_before
from fednorm.running.records import RunId
from fednorm.running.sealed import SHA, sealed
from fednorm.running.store import Store

PLAIN = (*TINY, "--engine", "sequential", "--quiet")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of one run that was played to its end."""
    folder = tmp_path_factory.mktemp("runs") / "compared"
    assert fednorm("compare", "fedavg", *PLAIN, "--out", folder).code == 0
    return folder


@pytest.fixture
def sent(ended: Path, tmp_path: Path) -> Path:
    """The folder as somebody sent it, and beside it a file of the user's, which no attack changes."""
    shutil.copytree(ended, tmp_path / "sent")
    (tmp_path / "precious").write_text("mine")
    return tmp_path / "sent"


CELL = "fedavg-seed0"
LINK = "is a link, which fednorm does not follow here; put the file itself in its place, or remove it"
REFUSED = (
    *(".lock", "config.json", "metrics.jsonl", "result.json"),
    *("state.sqlite", "state.sqlite-wal", "state.sqlite-shm", "state.sqlite-journal"),
)


@pytest.mark.parametrize("name", REFUSED)
def test_a_link_in_the_place_of_a_runs_file_is_refused(sent: Path, name: str) -> None:
    run = sent / CELL
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(sent.parent / "precious")
    done = fednorm("resume", run, "--quiet")
    if name == "result.json":  # a run alone writes its result without a look at the old one
        assert (done.code, (run / name).is_symlink()) == (0, False)
        (run / name).unlink()
        (run / name).symlink_to(sent.parent / "precious")
        done = fednorm("resume", sent, "--quiet")
    assert (done.code, done.err) == (2, f"error: '{run / name}' {LINK}\n")
    assert (sent.parent / "precious").read_text() == "mine"


def test_links_where_files_are_written_are_replaced_by_the_files(sent: Path) -> None:
    run, precious = sent / CELL, sent.parent / "precious"
    names = [
        "model.safetensors",
        "result.json.part",
        "metrics.jsonl.part",
        "model.safetensors.part",
        "config.json.part",
    ]
    for name in names:
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(precious)
    (run / "metrics.jsonl").unlink()
    (sent / "curves.png").symlink_to(precious)
    assert fednorm("resume", run, "--quiet", "--rounds", "4").code == 0
    assert (precious.read_text(), precious.stat().st_mode & 0o777) == ("mine", 0o644)
    assert [(run / name).is_symlink() for name in names] == [False] * 5
    assert json.loads((run / "result.json").read_text())["runs"][0]["rounds_done"] == 4


def test_a_run_of_a_comparison_that_is_a_link_is_refused(sent: Path) -> None:
    elsewhere = sent.parent / "elsewhere"
    (sent / CELL).rename(elsewhere)
    (elsewhere / "result.json").unlink()
    (sent / CELL).symlink_to(elsewhere)
    before = sorted(elsewhere.iterdir())
    done = fednorm("resume", sent, "--quiet")
    assert (done.code, done.err) == (2, f"error: '{sent / CELL}' {LINK}\n")
    assert sorted(elsewhere.iterdir()) == before


def test_the_folder_itself_may_be_a_link_of_the_users_own(sent: Path) -> None:
    (sent.parent / "latest").symlink_to(sent / CELL)
    assert fednorm("resume", sent.parent / "latest", "--quiet").code == 0


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", ".lock"])
def test_a_pipe_or_a_device_does_not_keep_anybody_waiting(sent: Path, name: str) -> None:
    run = sent / CELL
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    done = fednorm("resume", run, "--quiet")
    said = f"error: '{run / name}' is no plain file; put the file itself in its place, or remove it\n"
    assert (done.code, done.err) == (2, said)


def test_a_draft_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    draft_of(tmp_path / "a.json").symlink_to(tmp_path / "precious")
    write_json(tmp_path / "a.json", {"a": 1})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "precious"]
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_store_refuses_links_before_it_changes_anything(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "precious").chmod(0o644)
    (tmp_path / "state.sqlite").symlink_to(tmp_path / "precious")
    with pytest.raises(CheckpointError, match="is a link"):
        Store(tmp_path / "state.sqlite")
    assert stat.S_IMODE((tmp_path / "precious").stat().st_mode) == 0o644
    with closing(Store(tmp_path / "other.sqlite")):
        pass


# Archives and lists.


def tar_with(path: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(b"x" * member.size))
    return path


def member(name: str, size: int = 0, link: str = "", hard: bool = False) -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.size = size
    if link:
        found.type, found.linkname = (tarfile.LNKTYPE if hard else tarfile.SYMTYPE), link
    return found


@pytest.mark.parametrize("hard", [False, True])
def test_a_tar_with_links_is_refused(tmp_path: Path, hard: bool) -> None:
    archive = tar_with(tmp_path / "a.tar.gz", member("set/a", 3), member("set/b", link="set/a", hard=hard))
    with pytest.raises(ConfigError) as caught:
        unpack(archive)
    assert str(caught.value) == (
        f"{archive} holds a link, 'set/b', which is not unpacked; take it from its home again, or unpack it by hand"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar.gz"]


def test_a_zip_with_links_is_refused(tmp_path: Path) -> None:
    about = zipfile.ZipInfo("set/b")
    about.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(about, "/etc/passwd")
    with pytest.raises(ConfigError, match="holds a link, 'set/b', which is not unpacked"):
        unpack(tmp_path / "a.zip")
    assert [path.name for path in tmp_path.iterdir()] == ["a.zip"]


def test_an_archive_replaces_no_neighbour(tmp_path: Path) -> None:
    (tmp_path / "MNIST").mkdir()
    (tmp_path / "MNIST" / "mine").touch()
    archive = tar_with(tmp_path / "a.tar.gz", member("cifar/a", 3), member("MNIST/a", 3))
    with pytest.raises(ConfigError) as caught:
        unpack(archive, brings="cifar")
    assert str(caught.value) == (
        f"{archive} holds 'MNIST', and {tmp_path}/MNIST is there already; move that away and fetch again"
    )
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["MNIST", "a.tar.gz", "mine"]
    own = tar_with(tmp_path / "b.tar.gz", member("cifar/a", 3))
    assert unpack(own, brings="cifar") == unpack(own, brings="cifar") == [tmp_path / "cifar"]


def test_a_list_of_mnist_m_stays_in_its_folder(tmp_path: Path) -> None:
    root = tmp_path / "data" / "mnist_m"
    for split in ("train", "test"):
        (root / f"mnist_m_{split}").mkdir(parents=True)
        (root / f"mnist_m_{split}_labels.txt").write_text("../../../private.png 3\n")
    Image.new("RGB", (32, 32)).save(tmp_path / "private.png")
    for name in ("../../../private.png", str(tmp_path / "private.png"), "a/../../../../private.png"):
        (root / "mnist_m_train_labels.txt").write_text(f"{name} 3\n")
        with pytest.raises(ConfigError) as caught:
            load_dataset("mnist_m", tmp_path / "data", check=False)
        assert str(caught.value) == (
            f"{root}/mnist_m_train_labels.txt is damaged: '{name}' points out of {root}/mnist_m_train; "
            "delete it and get it again"
        )


@pytest.fixture
def endless() -> Iterator[str]:
    """A home whose file never ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            try:
                while True:
                    self.wfile.write(bytes(1 << 16))
            except OSError:  # the reader has had enough
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            """Keep the test output clean."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/file"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_download_has_an_end(endless: str, tmp_path: Path) -> None:
    download = Download(url=endless, md5="0" * 32, path="file", most_bytes=1_000_000)
    with pytest.raises(ConfigError) as caught:
        fetch("usps", tmp_path, downloads=[download])
    assert str(caught.value) == (
        f"{endless} has more than the 1,000,000 bytes it may have; nothing was kept, and if it happens twice the home "
        "has changed"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_download_does_not_follow_a_link(endless: str, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "file.part").symlink_to(tmp_path / "precious")
    with pytest.raises(CheckpointError, match="is a link"):
        fetch("usps", tmp_path, downloads=[Download(url=endless, md5=md5_of(tmp_path / "precious") + "x", path="file")])
    assert (tmp_path / "precious").read_text() == "mine"


# Names.

NAMES = ["../../x", "/etc/x", "a\0b", "x" * 10_000, "..", ".", "ﾊﾟ/..", "con", "\u202egnp.exe", "a\x1b[2Jb", "~", "*"]


@pytest.mark.fault(row=25)
def test_names_of_clients_are_no_paths(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    rows = len(NAMES) * 6
    draw = np.random.default_rng(0)
    client = np.repeat(np.array(NAMES), 6)
    np.savez(tmp_path / "own.npz", x=draw.normal(size=(rows, 3)), y=np.arange(rows) % 2, client=client)
    out = tmp_path / "room" / "run"
    asked = ("--method", "fedbn", "--rounds", "1", "--local-steps", "1", "--set", "train.batch_size=2")
    done = fednorm("run", "--data", f"npz:{tmp_path / 'own.npz'}", *asked, "--engine", "sequential", "--out", out)
    assert done.code == 0, done.err
    for name in NAMES:
        if "\0" not in name:  # no argument of a command has one
            exported = fednorm("export", out, "--client", name)
            assert exported.out == f"{out}/client-{sorted(NAMES).index(name)}.safetensors\n", exported.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own.npz", "room"]
    assert [path.name for path in (tmp_path / "room").iterdir()] == ["run"]


def test_what_a_file_says_does_nothing_to_a_terminal(tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\r"
    (tmp_path / "a.toml").write_text(f"method = {json.dumps(evil)}\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"given": [], "method": evil, "use": [f"{evil}.py"]}))
    (tmp_path / f"fo\x1b[31mlder{os.fsdecode(bytes([255]))}").mkdir()
    stranger = next(path for path in tmp_path.iterdir() if path.name.startswith("fo"))
    commands = [
        ("run", "--config", tmp_path / "a.toml"),
        ("resume", tmp_path / "run"),
        ("resume", tmp_path / "run", "--allow-code"),
        ("resume", tmp_path / "run", "--debug"),
        ("data", "check", f"folder:{stranger}"),
        ("methods", evil),
        ("inspect", evil),
    ]
    for command in commands:
        done = fednorm(*command)
        assert done.code == 2
        assert visible(done.out + done.err) == done.out + done.err
        (done.out + done.err).encode()  # bytes that are no text would not be printed at all


def test_names_in_rows_and_tables_do_nothing_either(sent: Path) -> None:
    names = ["a\x1b[2J", "b\u202e"]
    for result in (sent / "result.json", sent / CELL / "result.json"):
        stored = json.loads(result.read_text())
        stored["runs"][0] |= {"notes": ["\x1b[31mred\x1b[0m"], "client_names": names}
        del stored[SHA]
        result.write_text(json.dumps(sealed(stored)))  # whoever forges a file can digest it, too
    done = fednorm("resume", sent)
    assert done.code == 0
    assert "fedavg: \\x1b[31mred\\x1b[0m" in done.out
    assert "\x1b" not in done.out + done.err


def test_verbs_print_by_the_one_function_that_looks() -> None:
    for path in Path(cli.__file__).parent.glob("*.py"):
        if path.name != "output.py":
            called = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
            assert "print" not in [function.id for function in called if isinstance(function, ast.Name)], path.name


def test_lines_that_are_no_rows_are_passed_over(tmp_path: Path) -> None:
    lines = ['{"round": 1, "seconds": 2.0}', "[" * 5000, '{"round": 1e999}', '{"round": "\x1b"}', '{"round": 2}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    run = RunId("fedavg", 0)
    assert done_before({run: tmp_path}, 3).seconds == {run: {1: 2.0, 2: 0.0}}
    with RunFolder(tmp_path).metrics_open([tiny.row(1)]):  # type: ignore[list-item]
        pass
