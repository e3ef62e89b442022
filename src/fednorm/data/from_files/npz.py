"""Arrays in a numpy archive: x, y, and for each row its client and its split; or x_train, y_train, x_test, y_test."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fednorm.data.federation import Federation
from fednorm.data.from_files.file_set import OPEN, FileOptions, FileSet
from fednorm.data.from_files.labels import Labels, check_classes, class_labels, client_codes, number_labels, split_codes
from fednorm.data.from_files.problems import listed, noted, refuse
from fednorm.data.from_files.scaling import with_image_scale
from fednorm.data.from_files.source import Source
from fednorm.data.members import check_members
from fednorm.errors import ConfigError, first_line

PLAIN = ("x", "y", "client", "split")
PARTED = ("x_train", "y_train", "client_train", "x_test", "y_test", "client_test")
EXPECTED = "expected x and y, with client and split if you like, or x_train, y_train, x_test and y_test"
Form = Literal["images", "vectors", "tokens", "arrays"]


def read_npz(source: Source, options: FileOptions) -> FileSet:
    """Read the archive, and refuse what cannot be meant."""
    arrays = _joined(read_arrays(source.path), source.path)
    problems: list[str] = []
    count = len(arrays["x"]) if arrays["x"].ndim else 0
    for name, array in arrays.items():
        if array.ndim == 0 or len(array) != count:
            has = f"{len(array)} rows" if array.ndim else "no rows"
            problems.append(f"'{source.path}': {name} has {has} but x has {count}; each row needs one of each")
    if not count:
        problems.append(f"'{source.path}' has no rows; give it some examples")
    refuse(problems, source)
    x, form = _inputs(arrays["x"], source.path, problems)
    labels = Labels(x[:0], "", 0)
    with noted(problems):
        labels = _labels(arrays["y"], source.path, options.task)
    split = torch.full((count,), OPEN, dtype=torch.int8)
    if "split" in arrays:
        split = split_codes(arrays["split"], f"'{source.path}': split", _row, problems)
    refuse(problems, source)
    codes, names = client_codes(arrays["client"]) if "client" in arrays else (None, ())
    return FileSet(
        name=str(source),
        x=x,
        y=labels.y,
        split=split,
        client=codes,
        client_names=names,
        classes=labels.classes,
        num_classes=labels.num_classes,
        task=labels.task,
        form=form,
        finish=with_image_scale if form == "images" else _as_it_is,
        notes=(labels.note("y"), *(() if form == "images" else (f"{form} of shape {_shape(x)}, taken as they are",))),
    )


def _as_it_is(federation: Federation) -> Federation:
    return federation


def _row(index: int) -> str:
    return f"row {index}"


def _shape(x: Tensor) -> str:
    return " x ".join(map(str, x.shape[1:]))


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays that are known, of plain numbers or text; sizes are checked before any memory is taken."""
    if not path.exists():
        raise ConfigError(f"'{path}' does not exist; give a .npz file")
    if path.is_dir():
        raise ConfigError(f"'{path}' is a folder; give a .npz file, or folder:DIR for images")
    try:
        with zipfile.ZipFile(path) as archive:
            names = check_members(archive, path, (*PLAIN, *PARTED))
        with np.load(path, allow_pickle=False) as stored:
            found = {name: stored[name] for name in (*PLAIN, *PARTED) if name in names}
    except ConfigError:
        raise
    except Exception as error:  # whatever zipfile and numpy make of damaged bytes
        raise ConfigError(
            f"'{path}' is not a readable .npz file ({first_line(error)}); save it with np.savez"
        ) from None
    _check_names(found, sorted(names), path)
    return found


def _check_names(found: Mapping[str, np.ndarray], names: list[str], path: Path) -> None:
    parted = [name for name in PARTED if name in found]
    plain = [name for name in PLAIN if name in found]
    if parted and plain:
        raise ConfigError(f"'{path}' has {plain[0]} beside {parted[0]}; {EXPECTED}")
    needed = ("x_train", "y_train", "x_test", "y_test") if parted else ("x", "y")
    lacking = [name for name in needed if name not in found]
    if not lacking and ("client_train" in found) != ("client_test" in found):
        lacking = ["client_train" if "client_test" in found else "client_test"]
    if lacking:
        raise ConfigError(f"'{path}' has no array {lacking[0]} (it has {listed(names) or 'none'}); {EXPECTED}")


def _joined(arrays: dict[str, np.ndarray], path: Path) -> dict[str, np.ndarray]:
    """Arrays in two parts as one, training rows first, with their split."""
    if "x" in arrays:
        return arrays
    joined: dict[str, np.ndarray] = {}
    for name in ("x", "y", "client"):
        if f"{name}_train" not in arrays:
            continue
        train, test = arrays[f"{name}_train"], arrays[f"{name}_test"]
        if (
            train.shape[1:] != test.shape[1:]
            or train.dtype.kind != test.dtype.kind
            or (name == "x" and train.dtype != test.dtype)
        ):
            raise ConfigError(
                f"'{path}': {name}_train has rows of {train.shape[1:]} {train.dtype} but {name}_test of "
                f"{test.shape[1:]} {test.dtype}; they must be alike"
            )
        joined[name] = np.concatenate([train, test])
    sizes = [len(arrays["x_train"]), len(arrays["x_test"])]
    return {**joined, "split": np.repeat(np.array(["train", "test"]), sizes)}


def _inputs(x: np.ndarray, path: Path, problems: list[str]) -> tuple[Tensor, Form]:
    """Inputs as tensors: bytes are images, other whole numbers tokens, the rest floats."""
    if x.dtype == np.uint8:
        if x.ndim == 3:
            x = x[:, None]
        if x.ndim != 4:
            problems.append(
                f"'{path}': x of uint8 must be images (N, C, H, W) or (N, H, W), not {x.shape}; save other numbers as "
                "float32"
            )
        elif x.shape[-1] in (1, 3) and x.shape[1] not in (1, 3):
            problems.append(
                f"'{path}': x has shape {x.shape} with the channels last; save x.transpose(0, 3, 1, 2) in its place"
            )
        return torch.from_numpy(x), "images"
    if x.dtype.kind not in "fiub":
        problems.append(f"'{path}': x has the type {x.dtype}; expected floats, uint8 images or whole numbers (tokens)")
        return torch.zeros(len(x), 1), "arrays"
    if x.ndim < 2:
        problems.append(f"'{path}': x has shape {x.shape}; expected one row of numbers for each example")
    if x.dtype.kind in "iu":
        return torch.from_numpy(x.astype(np.int64)), "tokens"
    wrong = np.argwhere(~np.isfinite(x))
    if len(wrong):
        row, *place = wrong[0].tolist()
        problems.append(
            f"'{path}': x has {x[tuple(wrong[0])]} in row {row}, place {tuple(place)} ({len(wrong)} such values); "
            "replace or remove them"
        )
    return torch.from_numpy(x.astype(np.float32)), "vectors" if x.ndim == 2 else "arrays"


def _labels(y: np.ndarray, path: Path, task: str | None) -> Labels:
    """Targets by their type: whole numbers and text are classes, floats numbers to be met."""
    what = f"'{path}': y"
    kind = y.dtype.kind
    if y.ndim not in (1, 2) or kind not in "fiubU" or (y.ndim == 2 and kind == "U"):
        raise ConfigError(f"{what} has shape {y.shape} and type {y.dtype}; expected a label or a row of numbers each")
    if kind == "U":
        return class_labels(y, what)
    wrong = np.flatnonzero(~np.isfinite(y if y.ndim == 1 else y.sum(1)))
    if len(wrong):
        raise ConfigError(f"{what} is not a number in row {wrong[0]}; give every row a target")
    if y.ndim == 2:
        one_hot = y.shape[1] > 1 and bool(np.isin(y, (0, 1)).all() and (y.sum(1) == 1).all())
        if one_hot and task is None:
            raise ConfigError(
                f"{what} is one-hot with shape {y.shape}; save class numbers, y.argmax(1), or say --set task=multilabel"
            )
        return number_labels(y, task, what)
    if task == "regression" or (kind == "f" and task != "classification"):
        return number_labels(y, task, what)
    fractions = np.flatnonzero(y != np.round(y))
    if len(fractions):
        raise ConfigError(f"{what} is {y[fractions[0]]} in row {fractions[0]}, which is no class; leave out the task")
    negative = np.flatnonzero(y < 0)
    if len(negative):
        raise ConfigError(f"{what} is {y[negative[0]]} in row {negative[0]}; classes are numbered from 0")
    count = int(y.max()) + 1
    check_classes(count, what)
    return Labels(torch.from_numpy(y.astype(np.int64)), "classification", count, tuple(map(str, range(count))))
