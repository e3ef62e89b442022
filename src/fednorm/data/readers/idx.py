"""MNIST and Fashion-MNIST: idx files, plain or gzipped, or the packed archive."""

from __future__ import annotations

import hashlib
import math
import zlib
from pathlib import Path

import numpy as np

from fednorm.data.bounds import unpacked
from fednorm.data.image_set import ImageSet
from fednorm.data.readers.forms import Form, damaged, plain_or_gz
from fednorm.data.readers.packed import grey, labels, read_archive
from fednorm.errors import ConfigError

DIGITS = tuple(str(digit) for digit in range(10))
GARMENTS = (
    "t-shirt/top",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
TRAIN_LABELS_MD5 = {"mnist": "a25bea736e30d166cdddb491f175f624", "fashion_mnist": "9018921c3c673c538a1fc5bad174d6f9"}


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """One array of so many dimensions from an idx file of unsigned bytes."""
    found = plain_or_gz(path)
    if found is None:
        raise ConfigError(f"{path} is missing; the other files of the set are there")
    try:
        raw = unpacked(found) if found.suffix == ".gz" else found.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(found, str(error)) from error
    start = 4 + 4 * dimensions
    if len(raw) < start or raw[:4] != bytes((0, 0, 8, dimensions)):
        raise damaged(found, f"it does not begin like an idx file of bytes in {dimensions} dimensions")
    shape = np.frombuffer(raw, ">i4", dimensions, offset=4).tolist()
    if len(raw) - start != math.prod(shape) or min(shape) < 0:
        raise damaged(found, f"it announces {'x'.join(map(str, shape))} bytes and holds {len(raw) - start}")
    return np.frombuffer(bytearray(raw), np.uint8, offset=start).reshape(shape)


def grey_set(name: str, arrays: dict[str, np.ndarray]) -> ImageSet:
    """A set of 28x28 grey images with the classes and statistics of its name."""
    fashion = name.startswith("fashion")
    return ImageSet(
        name=name,
        train_x=grey(arrays["x_train"]),
        train_y=labels(arrays["y_train"]),
        test_x=grey(arrays["x_test"]),
        test_y=labels(arrays["y_test"]),
        num_classes=10,
        classes=GARMENTS if fashion else DIGITS,
        mean=(0.2860,) if fashion else (0.1307,),
        std=(0.3530,) if fashion else (0.3081,),
    )


def _read_files(name: str, root: Path) -> ImageSet:
    train_y = read_idx(root / FILES[1], 1)
    md5 = hashlib.md5(b"\0\0\x08\x01" + len(train_y).to_bytes(4, "big") + train_y.tobytes(), usedforsecurity=False)
    other = {known: key for key, known in TRAIN_LABELS_MD5.items()}.get(md5.hexdigest(), name)
    if other != name:  # the two sets use the same file names
        raise ConfigError(
            f"{root} holds {other}, not {name}; give each set its own folder (MNIST/raw, FashionMNIST/raw)"
        )
    arrays = {"x_train": read_idx(root / FILES[0], 3), "y_train": train_y}
    return grey_set(name, arrays | {"x_test": read_idx(root / FILES[2], 3), "y_test": read_idx(root / FILES[3], 1)})


def _forms(name: str, folder: str) -> tuple[Form, ...]:
    return (
        Form(
            name="idx files",
            roots=(f"{folder}/raw", folder, name, "."),
            files=FILES,
            read=lambda root, size: _read_files(name, root),
        ),
        Form(
            name="packed",
            files=(f"{name}.npz.xz",),
            read=lambda root, size: grey_set(name, read_archive(root / f"{name}.npz.xz")),
            packed=True,
        ),
    )


FORMS = {"mnist": _forms("mnist", "MNIST"), "fashion_mnist": _forms("fashion_mnist", "FashionMNIST")}
