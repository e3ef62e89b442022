"""Downloads against a real server on the loopback: resume, truncation, wrong checksum, no ranges."""

import hashlib
import io
import tarfile
import threading
import zipfile
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fednorm.data.archives import unpack
from fednorm.data.fetch import fetch
from fednorm.data.sources import DOWNLOADS, Download
from fednorm.data.verify import _checksums
from fednorm.errors import ConfigError, DiskError

BODY = bytes(range(256)) * 2000


@dataclass
class Home:
    """What the server gives and how it misbehaves."""

    body: bytes = BODY
    ranges: bool = True
    cut_at: list[int] = field(default_factory=list)
    status: int = 0
    asked: list[str] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def home():
    state = Home()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            wanted = self.headers.get("Range", "")
            state.asked.append(wanted)
            if state.status:
                self.send_error(state.status)
                return
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and state.ranges else 0
            if start >= len(state.body):
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(state.body) - start))
            self.end_headers()
            stop = state.cut_at.pop(0) if state.cut_at else len(state.body)
            self.wfile.write(state.body[start:stop])

        def log_message(self, format, *args):
            """Keep the test output clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}/file.bin"
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


def download(home, **changes):
    plain = {"url": home.url, "md5": hashlib.md5(home.body).hexdigest(), "path": "sub/file.bin"}  # noqa: S324
    return [Download(**(plain | changes))]


def test_a_file_arrives_whole_and_only_once(home, tmp_path):
    seen = []
    paths = fetch("usps", tmp_path, lambda *report: seen.append(report), downloads=download(home))
    assert [path.read_bytes() for path in paths] == [BODY]
    assert seen[-1] == ("sub/file.bin", len(BODY), len(BODY))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    fetch("usps", tmp_path, downloads=download(home))
    assert home.asked == [""]
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["file.bin"]


def test_a_broken_download_is_resumed_where_it_ended(home, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file.bin.part").write_bytes(BODY[:1000])
    (path,) = fetch("usps", tmp_path, downloads=download(home))
    assert path.read_bytes() == BODY
    assert home.asked == ["bytes=1000-"]


def test_a_line_that_breaks_is_taken_up_again(home, tmp_path):
    home.cut_at = [5000, 70_000]
    (path,) = fetch("usps", tmp_path, downloads=download(home))
    assert path.read_bytes() == BODY
    assert home.asked == ["", "bytes=5000-", "bytes=70000-"]


def test_a_line_that_keeps_breaking_leaves_the_part_and_says_how_to_go_on(home, tmp_path):
    home.cut_at = [5000, 6000, 7000]
    with pytest.raises(ConfigError) as caught:
        fetch("usps", tmp_path, downloads=download(home))
    assert str(caught.value) == (
        f"{home.url} could not be read to its end: the connection ended early after 7000 bytes; "
        "run the same command again to continue"
    )
    assert not (tmp_path / "sub" / "file.bin").exists()
    assert (tmp_path / "sub" / "file.bin.part").read_bytes() == BODY[:7000]
    (path,) = fetch("usps", tmp_path, downloads=download(home))
    assert path.read_bytes() == BODY
    assert home.asked[-1] == "bytes=7000-"


def test_a_server_without_ranges_starts_again(home, tmp_path):
    home.ranges = False
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file.bin.part").write_bytes(b"x" * 1000)
    (path,) = fetch("usps", tmp_path, downloads=download(home))
    assert path.read_bytes() == BODY


def test_a_wrong_checksum_deletes_the_file_and_names_both(home, tmp_path):
    with pytest.raises(ConfigError) as caught:
        fetch("usps", tmp_path, downloads=download(home, md5="0" * 32))
    right = hashlib.md5(BODY).hexdigest()  # noqa: S324
    assert str(caught.value) == (
        f"{home.url} has MD5 {right}, expected {'0' * 32}; the file was deleted, so try again, and if it happens twice "
        "the home has changed"
    )
    assert list((tmp_path / "sub").iterdir()) == []


def test_a_part_that_is_already_whole_is_used_and_one_too_long_is_dropped(home, tmp_path):
    (tmp_path / "sub").mkdir()
    part = tmp_path / "sub" / "file.bin.part"
    part.write_bytes(BODY)
    assert fetch("usps", tmp_path, downloads=download(home))[0].read_bytes() == BODY
    (tmp_path / "sub" / "file.bin").unlink()
    part.write_bytes(BODY + b"more")
    assert fetch("usps", tmp_path, downloads=download(home))[0].read_bytes() == BODY


def test_an_answer_that_says_no_is_passed_on(home, tmp_path):
    home.status = 404
    with pytest.raises(
        ConfigError, match=r"file.bin answered 404 Not Found; try later, or get the file by hand and put it at"
    ):
        fetch("usps", tmp_path, downloads=download(home))


def test_no_server_is_one_line(tmp_path):
    gone = [Download(url="http://127.0.0.1:9/x", md5="", path="x")]
    with pytest.raises(
        ConfigError, match=r"http://127.0.0.1:9/x could not be read to its end: .*refused after 0 bytes"
    ):
        fetch("usps", tmp_path, downloads=gone)


def test_only_web_addresses_are_opened(tmp_path):
    with pytest.raises(ConfigError, match="file:///etc/hosts is not an http or https address"):
        fetch("usps", tmp_path, downloads=[Download(url="file:///etc/hosts", md5="", path="x")])


def test_a_folder_that_cannot_be_written_is_a_disk_error(home, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DiskError, match=r"cannot write to .*file: "):
        fetch("usps", tmp_path / "file", downloads=download(home))


def tar_of(files):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def zip_of(files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


@pytest.mark.parametrize("pack", [tar_of, zip_of])
def test_archives_are_unpacked_and_removed(home, tmp_path, pack):
    home.body = pack({"cifar/a.bin": b"one", "cifar/b.bin": b"two"})
    paths = fetch("cifar10", tmp_path, downloads=download(home, path="file.bin", unpack=True))
    assert paths == [tmp_path / "cifar"]
    assert {path.name: path.read_bytes() for path in paths[0].iterdir()} == {"a.bin": b"one", "b.bin": b"two"}
    assert [path.name for path in tmp_path.iterdir()] == ["cifar"]


def test_an_archive_never_writes_outside_its_folder(tmp_path):
    room = tmp_path / "room"
    room.mkdir()
    (room / "bad.tar.gz").write_bytes(tar_of({"../escaped": b"x"}))
    with pytest.raises(ConfigError, match="cannot be unpacked"):
        unpack(room / "bad.tar.gz")
    (room / "bad.zip").write_bytes(zip_of({"../escaped": b"x"}))
    unpack(room / "bad.zip")
    assert not (tmp_path / "escaped").exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "cityscapes",
            "cityscapes cannot be fetched by a program; to get it, log in at https://www.cityscapes-dataset.com",
        ),
        ("fashion_mnist_small", "fashion_mnist_small is embedded in fednorm; there is nothing to fetch"),
        ("cifar11", "data set 'cifar11' is not known; did you mean 'cifar10'?"),
    ],
)
def test_what_cannot_be_fetched_says_why(tmp_path, name, text):
    with pytest.raises(ConfigError) as caught:
        fetch(name, tmp_path)
    assert str(caught.value).startswith(text)
    assert list(tmp_path.iterdir()) == []


def test_files_with_a_published_md5_are_compared(tmp_path):
    assert _checksums("usps", tmp_path) == _checksums("usps", None) == []
    (tmp_path / "usps.bz2").write_bytes(b"something else")
    with pytest.raises(ConfigError) as refusal:
        _checksums("usps", tmp_path)
    found = hashlib.md5(b"something else").hexdigest()  # noqa: S324
    expected = DOWNLOADS["usps"][0].md5
    assert str(refusal.value) == (
        f"{tmp_path}/usps.bz2 has MD5 {found}, expected {expected}; delete it and get it again"
    )
