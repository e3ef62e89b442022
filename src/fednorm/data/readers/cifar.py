"""CIFAR-10 and CIFAR-100: the binary distribution, or CIFAR-10 packed. Python pickles are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fednorm.data.image_set import ImageSet
from fednorm.data.readers.forms import Form, damaged
from fednorm.data.readers.packed import labels, read_archive, unpack_into
from fednorm.errors import ConfigError

PIXELS = 3 * 32 * 32
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR10_MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
PICKLED = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}


def read_records(paths: list[Path], label_bytes: int) -> tuple[Tensor, Tensor]:
    """Images and labels from files of fixed records: label bytes (the last one counts), then 3x32x32 pixels."""
    width = label_bytes + PIXELS
    counts = []
    for path in paths:
        if path.stat().st_size % width or path.stat().st_size == 0:
            raise damaged(path, f"{path.stat().st_size} bytes are not a number of records of {width}")
        counts.append(path.stat().st_size // width)
    x = torch.empty((sum(counts), 3, 32, 32), dtype=torch.uint8)
    y = torch.empty(sum(counts), dtype=torch.int64)
    start = 0
    for path, count in zip(paths, counts, strict=True):
        records = np.memmap(path, np.uint8, "r", shape=(count, width))
        x.numpy()[start : start + count] = records[:, label_bytes:].reshape(count, 3, 32, 32)
        y.numpy()[start : start + count] = records[:, label_bytes - 1]
        start += count
    return x, y


def _cifar10(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> ImageSet:
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    return ImageSet.of("cifar10", train, test, CIFAR10_CLASSES, mean, std)


def _read_cifar10(root: Path, size: int | None) -> ImageSet:
    files = [root / name for name in CIFAR10_MD5]
    return _cifar10(read_records(files[:5], 1), read_records(files[5:], 1))


def _read_packed(root: Path, size: int | None) -> ImageSet:
    parts = {"train": ("train_0.npz", "train_1.npz"), "test": ("test.npz",)}
    sets: dict[str, tuple[Tensor, Tensor]] = {}
    for split, names in parts.items():
        y = torch.cat([labels(read_archive(root / name, "y")["y"]) for name in names])
        x = torch.empty((len(y), 3, 32, 32), dtype=torch.uint8)
        start = 0
        for name in names:
            part = read_archive(root / name)
            unpack_into(x[start : start + len(part["y"])], part["blob"], part["off"])
            start += len(part["y"])
        sets[split] = x, y
    return _cifar10(sets["train"], sets["test"])


def _read_cifar100(root: Path, size: int | None) -> ImageSet:
    train, test = (read_records([root / f"{split}.bin"], 2) for split in ("train", "test"))
    names = root / "fine_label_names.txt"
    classes = names.read_text().split() if names.exists() else ()
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    return ImageSet.of("cifar100", train, test, classes, mean, std, num_classes=100)


def refuse_pickles(name: str, folder: Path) -> None:
    """Say why the Python version of the set is not read, where it is all there is."""
    if (folder / PICKLED[name]).exists():
        raise ConfigError(
            f"{folder / PICKLED[name]} holds Python pickles, which can run code when read; take the binary version: "
            f"fednorm data fetch {name} --data-dir {folder}"
        )


FORMS = {
    "cifar10": (
        Form(
            name="binary batches",
            roots=("cifar-10-batches-bin",),
            files=tuple(CIFAR10_MD5),
            read=_read_cifar10,
        ),
        Form(
            name="packed",
            roots=("cifar10",),
            files=("train_0.npz", "train_1.npz", "test.npz"),
            read=_read_packed,
            packed=True,
        ),
    ),
    "cifar100": (
        Form(name="binary files", roots=("cifar-100-binary",), files=("train.bin", "test.bin"), read=_read_cifar100),
    ),
}
