"""USPS, SVHN, MNIST-M and SynthDigits, and the five digit domains made of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fednorm.core import rng
from fednorm.data.bounds import most_bytes, unpacked
from fednorm.data.image_set import ImageSet, resize
from fednorm.data.readers.forms import Form, below, damaged, lines_of
from fednorm.data.readers.idx import DIGITS
from fednorm.data.readers.images import read_class_tree, read_images
from fednorm.data.readers.matlab import read_matlab
from fednorm.data.readers.packed import grey, labels, read_archive, unpack
from fednorm.data.registry import DIGIT_DOMAINS
from fednorm.errors import first_line

TRAIN_PER_DOMAIN = 7_438
USPS_TEST = 1_860


def digit_set(name: str, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> ImageSet:
    """A set of the ten digits, scaled to [-1, 1] as FedBN does."""
    half = (0.5,) * train[0].shape[1]
    return ImageSet.of(name, train, test, DIGITS, mean=half, std=half)


def read_libsvm(path: Path) -> tuple[Tensor, Tensor]:
    """USPS lines `label 1:value ... 256:value`, labels 1 to 10, values from -1 to 1."""
    pixels, codes = [], []
    try:
        for line in unpacked(path).decode("ascii").splitlines():
            label, *entries = line.split()
            row = np.full(256, -1.0)
            for entry in entries:
                column, value = entry.split(":")
                row[range(256)[int(column) - 1]] = float(value)
            pixels.append(row)
            codes.append(range(10)[int(label) - 1])
        if not codes:
            raise ValueError("no line in it")
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise damaged(path, f"not USPS in libsvm form ({error})") from error
    images = ((np.stack(pixels) + 1) / 2 * 255).astype(np.uint8).reshape(-1, 16, 16)  # cut off, as torchvision does
    return grey(images), torch.tensor(codes, dtype=torch.int64)


def read_mat(path: Path) -> tuple[Tensor, Tensor]:
    """SVHN's and SynthDigits' MATLAB files: X (H, W, 3, N), y (N, 1), where 10 means the digit 0."""
    try:
        content = read_matlab(path, ("X", "y"), most_bytes(path.stat().st_size))
        images, codes = content["X"], content["y"].reshape(-1)
    except (ValueError, KeyError, OSError) as error:
        raise damaged(path, f"not a MATLAB file with X and y ({first_line(error)})") from error
    if images.dtype != np.uint8 or images.ndim != 4 or codes.dtype.kind not in "uif" or len(codes) != images.shape[3]:
        raise damaged(path, f"X is {images.shape} {images.dtype} and y {codes.shape} {codes.dtype}")
    x = torch.from_numpy(np.ascontiguousarray(images.transpose(3, 2, 0, 1)))
    return x, torch.from_numpy(codes.astype(np.int64) % 10)


def _packed_colour(name: str, size: int) -> Form:
    def read(root: Path, _size: int | None) -> ImageSet:
        pack = read_archive(root / f"{name}.npz")
        train, test = (
            (
                unpack(pack[f"{split}_blob"], pack[f"{split}_off"], len(pack[f"y_{split}"]), size, size),
                labels(pack[f"y_{split}"]),
            )
            for split in ("train", "test")
        )
        return digit_set(name, train, test)

    return Form(name="packed", files=(f"{name}.npz",), read=read, packed=True)


def _read_usps(root: Path, _size: int | None) -> ImageSet:
    return digit_set("usps", read_libsvm(root / "usps.bz2"), read_libsvm(root / "usps.t.bz2"))


def _read_usps_packed(root: Path, _size: int | None) -> ImageSet:
    pack = read_archive(root / "usps.npz.xz")
    train, test = ((grey(pack[f"x_{split}"]), labels(pack[f"y_{split}"])) for split in ("train", "test"))
    return digit_set("usps", train, test)


def _mat_form(name: str, roots: tuple[str, ...], train: str, test: str) -> Form:
    return Form(
        name="MATLAB files",
        roots=roots,
        files=(train, test),
        read=lambda root, size: digit_set(name, read_mat(root / train), read_mat(root / test)),
    )


def _tree_form(name: str, size: int) -> Form:
    def read(root: Path, wanted: int | None) -> ImageSet:
        side = (wanted or size, wanted or size)
        return digit_set(name, *(read_class_tree(root / split, DIGITS, side) for split in ("train", "test")))

    files = tuple(f"{split}/{digit}" for split in ("train", "test") for digit in DIGITS)
    return Form(name="class folders", roots=(name,), files=files, read=read)


def _read_listed(root: Path, _size: int | None) -> ImageSet:
    def split(name: str) -> tuple[Tensor, Tensor]:
        listing = root / f"{name}_labels.txt"
        entries = [line.split() for line in lines_of(listing) if line.strip()]
        if not entries or any(len(entry) != 2 or entry[1] not in DIGITS for entry in entries):
            raise damaged(listing, "expected lines of a file name and a digit")
        codes = torch.tensor([int(label) for _, label in entries], dtype=torch.int64)
        # The published images are 32x32 with the digit in the middle; the set is used at 28x28.
        return read_images([below(root / name, file, listing) for file, _ in entries], (28, 28)), codes

    return digit_set("mnist_m", split("mnist_m_train"), split("mnist_m_test"))


FORMS = {
    "usps": (
        Form(name="libsvm text", roots=(".", "usps", "USPS"), files=("usps.bz2", "usps.t.bz2"), read=_read_usps),
        Form(name="packed", files=("usps.npz.xz",), read=_read_usps_packed, packed=True),
    ),
    "svhn": (
        _mat_form("svhn", ("svhn", "SVHN", "."), "train_32x32.mat", "test_32x32.mat"),
        _packed_colour("svhn", 32),
    ),
    "mnist_m": (
        Form(
            name="listed images",
            roots=("mnist_m",),
            files=("mnist_m_train_labels.txt", "mnist_m_test_labels.txt", "mnist_m_train", "mnist_m_test"),
            read=_read_listed,
        ),
        _tree_form("mnist_m", 28),
        _packed_colour("mnist_m", 28),
    ),
    "synth_digits": (
        _mat_form("synth_digits", ("synth_digits", "SynthDigits"), "synth_train_32x32.mat", "synth_test_32x32.mat"),
        _tree_form("synth_digits", 32),
        _packed_colour("synth_digits", 32),
    ),
}


def to_28_colour(x: Tensor) -> Tensor:
    """Any digit images as 28x28 colour."""
    return resize(x, 28, 28).expand(-1, 3, -1, -1)


def digits_five(parts: Mapping[str, ImageSet]) -> ImageSet:
    """FedBN's five domains at 28x28 colour with 7,438 training images each, drawn by a fixed key.

    USPS is joined and divided again into 7,438 and 1,860. MNIST gives only rows below 50,000 and 7,000, since MNIST-M
    may be made of the others.
    """
    rows = {name: _rows_of(name, parts[name]) for name in DIGIT_DOMAINS}
    pools = {name: (parts[name].train_x, parts[name].train_y) for name in DIGIT_DOMAINS}
    tests = {name: (parts[name].test_x, parts[name].test_y) for name in DIGIT_DOMAINS}
    usps = parts["usps"]
    pools["usps"] = tests["usps"] = (torch.cat([usps.train_x, usps.test_x]), torch.cat([usps.train_y, usps.test_y]))
    train = [(to_28_colour(pools[name][0][rows[name][0]]), pools[name][1][rows[name][0]]) for name in DIGIT_DOMAINS]
    test = [(to_28_colour(tests[name][0][rows[name][1]]), tests[name][1][rows[name][1]]) for name in DIGIT_DOMAINS]
    return ImageSet(
        name="digits_five",
        train_x=torch.cat([x for x, _ in train]),
        train_y=torch.cat([y for _, y in train]),
        test_x=torch.cat([x for x, _ in test]),
        test_y=torch.cat([y for _, y in test]),
        num_classes=10,
        classes=DIGITS,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        train_domain=torch.cat([torch.full_like(y, d) for d, (_, y) in enumerate(train)]),
        test_domain=torch.cat([torch.full_like(y, d) for d, (_, y) in enumerate(test)]),
        domain_names=DIGIT_DOMAINS,
    )


def _rows_of(name: str, part: ImageSet) -> tuple[Tensor, Tensor]:
    """Training and test rows of one domain (for USPS: of the joined set), ascending."""
    if name == "usps":
        order = rng.permutation(rng.key("digits_five", name), len(part.train_y) + len(part.test_y))
        return order[USPS_TEST:].sort().values[:TRAIN_PER_DOMAIN], order[:USPS_TEST].sort().values
    train, test = len(part.train_y), len(part.test_y)
    if name == "mnist":
        train, test = min(train, 50_000), min(test, 7_000)
    order = rng.permutation(rng.key("digits_five", name), train)[:TRAIN_PER_DOMAIN]
    return order.sort().values, torch.arange(test)
