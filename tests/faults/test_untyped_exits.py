"""Input that used to end in a traceback: exit code 2 or 5, and one line that names what is wrong."""

from __future__ import annotations

import gzip
import io
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from command import ONE_THREAD, TINY, fednorm
from fednorm.data.from_files.npz import read_arrays
from fednorm.data.readers.digits import read_libsvm, read_mat
from fednorm.data.readers.idx import read_idx
from fednorm.data.readers.packed import read_archive
from fednorm.errors import CheckpointError, ConfigError
from fednorm.running.resuming import load_result

DEEP = "[" * 100_000
HUGE = "1" + "0" * 400
LARGEST = 2**63 - 1


def folder(path: Path, **files: str) -> Path:
    path.mkdir()
    for name, text in files.items():
        (path / name.replace("_", ".")).write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (DEEP, "nested too deeply"),
        ('{"rounds":' * 50_000, "nested too deeply"),
        ('{"given": [], "rounds": ' + "[" * 200 + "]" * 200 + "}", "nested too deeply"),
        (
            '{"rounds": ' + "1" * 5000 + "}",
            "Exceeds the limit (4300 digits) for integer string conversion: value has 5000 digits; "
            "use sys.set_int_max_str_digits() to increase the limit",
        ),
    ],
)
def test_a_config_that_is_none(tmp_path: Path, text: str, problem: str) -> None:
    run = folder(tmp_path / "run", config_json=text)
    for verb in ("resume", "export"):
        done = fednorm(verb, run)
        assert (done.code, done.err) == (2, f"error: '{run}/config.json' is damaged ({problem}); start the run anew\n")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"a = {DEEP}", "nested too deeply"),
        (f"rounds{'.a' * 5000} = 1", "nested too deeply"),
        (
            f"rounds = {'1' * 5000}",
            "Exceeds the limit (4300 digits) for integer string conversion: value has 5000 digits; "
            "use sys.set_int_max_str_digits() to increase the limit",
        ),
    ],
)
def test_a_recipe_that_is_none(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "a.toml").write_text(text)
    done = fednorm("run", "--config", tmp_path / "a.toml")
    assert (done.code, done.err) == (2, f"error: '{tmp_path}/a.toml' is not TOML: {problem}\n")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--seed", 2**70), f"seed={2**70} is out of range; give {LARGEST} or less"),
        (("--seed", 2**63), f"seed={2**63} is out of range; give {LARGEST} or less"),
        (("--rounds", HUGE), f"rounds=100000000000... is out of range; give {LARGEST} or less"),
        (("--lr", HUGE), f"train.lr=100000000000... is out of range; give {LARGEST} or less"),
        (
            ("--set", f"train.batch_size=-{HUGE}"),
            "train.batch_size=-10000000000... is out of range; give",
        ),
        (("--set", "engine.threads=5000"), "engine.threads=5000 is out of range; give 4096 or less"),
        (("--set", "data.size=100000"), "data.size=100000 is out of range; give 16384 or less"),
        (
            ("--method", f"fedprox(mu={HUGE})"),
            f"'fedprox(mu={HUGE})' gives 'mu' a number of 401 digits; give",
        ),
        (("--partition", "iid(seed=4)"), "partition 'iid' has no options; leave out 'seed'"),
        (("--partition", "iid(num_clients=4)"), "partition 'iid' has no options; leave out 'num_clients'"),
        (("--partition", "shards(seed=4)"), "option of partition 'shards' 'seed' is not known; known: classes_per_"),
        (
            ("--model", "mlp_bn(seed=3)"),
            "model 'mlp_bn(seed=3)': 'seed' follows from the data and the run; leave it",
        ),
        (
            ("--model", "mlp_bn(name=a)"),
            "model 'mlp_bn(name=a)': 'name' follows from the data and the run; leave it",
        ),
        (("--data-dir", "\ud800", "--data", "mnist"), "mnist was not found in \\ud800; expected"),
    ],
)
def test_values_that_nothing_can_hold(tmp_path: Path, arguments: tuple[object, ...], problem: str) -> None:
    done = fednorm("run", *TINY, "--out", tmp_path / "run", *arguments)
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    assert done.err.startswith(f"error: {problem}"), done.err
    assert not (tmp_path / "run").exists()


def test_inspect_takes_its_sizes_as_flags() -> None:
    done = fednorm("inspect", "mlp_bn(num_classes=3)")
    said = "model 'mlp_bn(num_classes=3)': 'num_classes' follows from the data and the run; leave it out"
    assert (done.code, done.err) == (2, f"error: {said}\n")


def idx(*sizes: int, content: bytes = b"") -> bytes:
    return bytes((0, 0, 8, len(sizes))) + b"".join(size.to_bytes(4, "big", signed=True) for size in sizes) + content


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (idx(-2, -2, 1, content=bytes(4)), "it announces -2x-2x1 bytes and holds 4"),
        (idx(-1, 2, 2, content=bytes(4)), "it announces -1x2x2 bytes and holds 4"),
        (idx(2**31 - 1, 2**31 - 1, 2**31 - 1), f"it announces {'x'.join([str(2**31 - 1)] * 3)} bytes and holds 0"),
        (idx(2, content=bytes(2)), "it does not begin like an idx file of bytes in 3 dimensions"),
        (bytes((0, 0, 8, 255)), "it does not begin like an idx file of bytes in 3 dimensions"),
        (b"", "it does not begin like an idx file of bytes in 3 dimensions"),
    ],
)
def test_idx_files_that_lie(tmp_path: Path, data: bytes, problem: str) -> None:
    (tmp_path / "images").write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        read_idx(tmp_path / "images", 3)
    assert str(caught.value) == f"{tmp_path}/images is damaged: {problem}; delete it and get it again"


def mat() -> bytes:
    buffer = io.BytesIO()
    content = {"X": np.zeros((4, 4, 3, 2), np.uint8), "y": np.ones((2, 1), np.uint8)}
    savemat(buffer, content, do_compression=True)
    return buffer.getvalue()


def npz(**arrays: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


ARRAYS = npz(x=np.zeros((3, 2)), y=np.zeros(3, np.int64))
DAMAGED: dict[str, tuple[bytes, Callable[[Path], object]]] = {
    "own.mat": (mat(), read_mat),
    "own.npz": (ARRAYS, read_arrays),
    "packed.npz": (ARRAYS, read_archive),
    "images.gz": (gzip.compress(idx(2, 2, 2, content=bytes(8))), lambda path: read_idx(path.with_suffix(""), 3)),
    "usps.bz2": (b"BZh9" + bytes(40), read_libsvm),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_one_line_whatever_the_damage(tmp_path: Path, name: str) -> None:
    """Every cut, and bytes changed by a fixed key: what still reads is left to digests."""
    whole, read = DAMAGED[name]
    draw = random.Random(0)  # noqa: S311
    changed = [whole[:end] for end in range(0, len(whole), max(1, len(whole) // 100))]
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(draw.choice((1, 1, 3))):
            data[draw.randrange(len(data))] = draw.randrange(256)
        changed.append(bytes(data))
    refused: list[str] = []
    for data in changed:
        (tmp_path / name).write_bytes(data)
        try:
            read(tmp_path / name)
        except ConfigError as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert not any("\n" in text for text in refused)


FULL = "error: what was to be printed cannot be written: No space left on device; give it another place\n"


@pytest.mark.parametrize("arguments", [("--help",), ("--version",)])
def test_a_full_stdout_is_exit_code_5(arguments: tuple[str, ...], tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "fednorm", *arguments]
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=ONE_THREAD, check=False
        )
    assert (done.returncode, done.stderr) == (5, FULL)


def test_a_stdout_or_stderr_that_is_closed_or_full(tmp_path: Path) -> None:
    here = f"{sys.executable} -m fednorm"
    for line, code in ((f"{here} --version >&-", 0), (f"{here} nothing 2>/dev/full", 2)):
        done = subprocess.run(["sh", "-c", line], capture_output=True, cwd=tmp_path, env=ONE_THREAD, check=False)
        assert (done.returncode, done.stderr) == (code, b"")


def test_a_result_that_is_nested_too_deeply(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", config_json=json.dumps({"given": []}), result_json=DEEP)
    with pytest.raises(CheckpointError, match=r"result.json' is damaged \(nested too deeply\); start the run anew$"):
        load_result(run)
