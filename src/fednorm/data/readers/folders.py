"""Tiny ImageNet and ImageNet: one folder per class."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from fednorm.data.image_set import ImageSet
from fednorm.data.readers.forms import Form, below, damaged, lines_of
from fednorm.data.readers.images import class_folders, image_files, read_class_tree, read_images
from fednorm.errors import ConfigError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _set(name: str, classes: list[str], train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> ImageSet:
    return ImageSet.of(name, train, test, classes, MEAN, STD)


def _read_tiny(root: Path, size: int | None) -> ImageSet:
    classes = class_folders(root / "train")
    side = (size or 64, size or 64)
    train = [(path, k) for k, name in enumerate(classes) for path in image_files(root / "train" / name / "images")]
    listing = root / "val" / "val_annotations.txt"
    test: list[tuple[Path, int]] = []
    for line in lines_of(listing):
        file, _, rest = line.partition("\t")
        name = rest.partition("\t")[0]
        if name not in classes:
            raise damaged(listing, f"class '{name}' has no folder in {root / 'train'}")
        test.append((below(root / "val" / "images", file, listing), classes.index(name)))
    pools = [
        (read_images([path for path, _ in part], side), torch.tensor([k for _, k in part])) for part in (train, test)
    ]
    return _set("tiny_imagenet", classes, pools[0], pools[1])


def _read_imagenet(root: Path, size: int | None) -> ImageSet:
    classes = class_folders(root / "train")
    if class_folders(root / "val") != classes:
        raise ConfigError(
            f"{root / 'val'} does not have the class folders of {root / 'train'}; sort the validation images into one "
            "folder per class (WNID), as torchvision's ImageNet does"
        )
    side = (size or 64, size or 64)
    train, test = (read_class_tree(root / split, classes, side) for split in ("train", "val"))
    return _set("imagenet1k", classes, train, test)


FORMS = {
    "tiny_imagenet": (
        Form(
            name="class folders",
            roots=("tiny-imagenet-200",),
            files=("train", "val/val_annotations.txt"),
            read=_read_tiny,
        ),
    ),
    "imagenet1k": (
        Form(
            name="class folders",
            roots=("imagenet", "ILSVRC2012", "ILSVRC/Data/CLS-LOC"),
            files=("train", "val"),
            read=_read_imagenet,
        ),
    ),
}
