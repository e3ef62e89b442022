"""Numpy archives as data: arrays by name, by type, and every refusal by its exact words."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fednorm.data.from_files.deal import deal
from fednorm.data.from_files.file_set import FileOptions, FileSet
from fednorm.data.from_files.read import read
from fednorm.data.from_files.source import find_source
from fednorm.errors import ConfigError

X = np.arange(24, dtype=np.float64).reshape(8, 3)
Y = np.array([0, 1] * 4)
CLIENT = np.array(["b", "a"] * 4)
EXPECTED = "expected x and y, with client and split if you like, or x_train, y_train, x_test and y_test"


def archive(tmp_path: Path, task: str | None = None, **arrays: Any) -> FileSet:
    path = tmp_path / "data.npz"
    np.savez_compressed(path, **arrays)
    return read_path(path, task)


def read_path(path: Path, task: str | None = None) -> FileSet:
    source = find_source(f"npz:{path}")
    assert source is not None
    return read(source, FileOptions(task=task))


def test_clients_by_name_with_a_split(tmp_path: Path) -> None:
    split = np.array(["train"] * 6 + ["test"] * 2)
    files = archive(tmp_path, x=X, y=Y, client=CLIENT, split=split)
    data = deal(files, partition="own", options={}, num_clients=2, seed=0)
    assert (data.client_names, data.num_classes, data.task) == (("a", "b"), 2, "classification")
    assert [rows.tolist() for rows in data.clients] == [[1, 3, 5], [0, 2, 4]]
    assert [rows.tolist() for rows in data.own_test] == [[1], [0]]
    assert torch.equal(data.x, torch.arange(18, dtype=torch.float32).view(6, 3))
    assert data.notes == ("y: classification, 2 classes (0, 1)", "vectors of shape 3, taken as they are")


def test_parts_for_training_and_tests(tmp_path: Path) -> None:
    files = archive(tmp_path, x_train=X[:6], y_train=Y[:6], x_test=X[6:], y_test=Y[6:])
    data = deal(files, partition="iid", options={}, num_clients=3, seed=0)
    assert (len(data.y), data.test_y.tolist(), len(data.clients)) == (6, [0, 1], 3)


def test_bytes_are_images_and_other_whole_numbers_tokens(tmp_path: Path) -> None:
    images = archive(tmp_path, x=np.zeros((8, 4, 4), dtype=np.uint8), y=Y, client=CLIENT)
    assert (images.form, images.x.shape) == ("images", (8, 1, 4, 4))
    tokens = archive(tmp_path, x=np.arange(16, dtype=np.uint16).reshape(8, 2), y=Y, client=CLIENT)
    assert (tokens.form, tokens.x.dtype) == ("tokens", torch.int64)


@pytest.mark.parametrize(
    ("y", "task", "found", "shape"),
    [
        (np.array(["x", "y"] * 4), None, "classification", (8,)),
        (np.linspace(0, 1, 8), None, "regression", (8,)),
        (Y, "regression", "regression", (8,)),
        (np.ones((8, 3)), None, "multilabel", (8, 3)),
        (np.full((8, 2), 0.5), None, "regression", (8, 2)),
        (np.eye(2)[Y], "multilabel", "multilabel", (8, 2)),
    ],
)
def test_the_task_follows_from_y(
    y: np.ndarray, task: str | None, found: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    files = archive(tmp_path, task, x=X, y=y)
    assert (files.task, files.y.shape) == (found, shape)
    assert files.y.dtype == (torch.int64 if found == "classification" else torch.float32)


@pytest.mark.parametrize(
    ("arrays", "problem"),
    [
        ({"x": X}, f"has no array y (it has x); {EXPECTED}"),
        ({"a": X}, f"has no array x (it has a); {EXPECTED}"),
        ({"x": X, "y": Y, "x_test": X}, f"has x beside x_test; {EXPECTED}"),
        ({"x": X, "y": Y[:5]}, ": y has 5 rows but x has 8; each row needs one of each"),
        (
            {"x": X, "y": Y, "client": CLIENT[:7]},
            ": client has 7 rows but x has 8; each row needs one of each",
        ),
        ({"x": X[:0], "y": Y[:0]}, " has no rows; give it some examples"),
        ({"x": X, "y": -Y}, ": y is -1 in row 1; classes are numbered from 0"),
        (
            {"x": X, "y": np.eye(2)[Y]},
            ": y is one-hot with shape (8, 2); save class numbers, y.argmax(1), or say --set task=multilabel",
        ),
        (
            {"x": X, "y": np.where(Y, np.nan, 0.5)},
            ": y is not a number in row 1; give every row a target",
        ),
        (
            {"x": np.where(X == 5, np.nan, X), "y": Y},
            ": x has nan in row 1, place (2,) (1 such values); replace or remove them",
        ),
        (
            {"x": X[:, 0], "y": Y},
            ": x has shape (8,); expected one row of numbers for each example",
        ),
        (
            {"x": X.astype(np.uint8), "y": Y},
            ": x of uint8 must be images (N, C, H, W) or (N, H, W), not (8, 3); save other numbers as float32",
        ),
        (
            {"x": np.zeros((8, 4, 4, 3), np.uint8), "y": Y},
            ": x has shape (8, 4, 4, 3) with the channels last; save x.transpose(0, 3, 1, 2) in its place",
        ),
        (
            {"x": X.astype(str), "y": Y},
            ": x has the type <U32; expected floats, uint8 images or whole numbers (tokens)",
        ),
        (
            {"x": X, "y": Y, "split": np.array(["train"] * 7 + ["val"])},
            ": split, row 7: 'val' is neither train nor test",
        ),
        (
            {"x": X, "y": Y * 5000},
            ": y would make 5,001 classes; if it is a quantity, say --set task=regression",
        ),
        (
            {"x_train": X, "y_train": Y, "x_test": X[:, :2], "y_test": Y},
            ": x_train has rows of (3,) float64 but x_test of (2,) float64; they must be alike",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(arrays: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        archive(tmp_path, **arrays)
    assert str(refused.value) == f"'{tmp_path}/data.npz'{'' if problem[0] in ': ' else ' '}{problem}"


def test_objects_are_never_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        archive(tmp_path, x=X, y=np.array([{}] * 8, dtype=object))
    assert str(refused.value) == (
        f"'{tmp_path}/data.npz': y holds Python objects, which are never read; save numbers, or text as dtype 'U'"
    )


def test_a_header_that_promises_more_than_the_file_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, y=Y)
    with zipfile.ZipFile(path, "a") as archive, archive.open("x.npy", "w") as file:
        header = {"descr": "<f8", "fortran_order": False, "shape": (10**12, 3)}
        np.lib.format.write_array_header_1_0(file, header)
    with pytest.raises(ConfigError) as refused:
        read_path(path)
    assert str(refused.value) == (
        f"'{path}': x says it has 24,000,000,000,000 bytes, which its file does not hold; save it again"
    )


def test_what_is_no_archive(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    path.write_text("no archive")
    with pytest.raises(ConfigError) as refused:
        read_path(path)
    assert str(refused.value) == (
        f"'{path}' is not a readable .npz file (File is not a zip file); save it with np.savez"
    )
    with pytest.raises(ConfigError, match=r"does not exist; give a \.npz file$"):
        read_path(tmp_path / "none.npz")
    with pytest.raises(ConfigError, match=r"is a folder; give a \.npz file, or folder:DIR for images$"):
        read_path(tmp_path)
