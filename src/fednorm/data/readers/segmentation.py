"""Cityscapes (one domain per city) and CamVid (one domain per sequence): images with label masks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fednorm.data.image_set import ImageSet
from fednorm.data.readers.forms import Form, damaged
from fednorm.data.readers.images import image_files, read_images
from fednorm.data.readers.packed import read_archive, unpack, unpack_masks

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Cityscapes: the 34 raw label ids in the order of the 19 classes that are trained and scored.
TRAINED_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
CITY_CLASSES = (
    "road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign", "vegetation", "terrain",
    "sky", "person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle",
)  # fmt: skip
CAMVID_CLASSES = (
    "sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist",
)  # fmt: skip
CITY_IGNORE, CAMVID_IGNORE = 255, 11

Split = tuple[Tensor, Tensor, list[str]]


def _assemble(name: str, train: Split, test: Split, classes: tuple[str, ...], ignore: int) -> ImageSet:
    """One set from (images, masks, domain of each row) for training and test."""
    found = ImageSet.of(name, train[:2], test[:2], classes, MEAN, STD).with_domains(train[2], test[2])
    return replace(found, task="segmentation", ignore_index=ignore)


def _city_split(root: Path, split: str, size: int | None) -> Split:
    images, masks, cities = [], [], []
    for city in sorted(path.name for path in (root / "leftImg8bit" / split).iterdir() if path.is_dir()):
        for image in image_files(root / "leftImg8bit" / split / city):
            name = image.name.replace("_leftImg8bit.png", "_gtFine_labelIds.png")
            mask = root / "gtFine" / split / city / name
            if not mask.exists():
                raise damaged(image, f"its mask {mask} is missing")
            images.append(image)
            masks.append(mask)
            cities.append(city)
    # `size` is the height; Cityscapes images are twice as wide as high.
    shape = None if size is None else (size, 2 * size)
    to_class = np.full(256, CITY_IGNORE, dtype=np.uint8)
    to_class[list(TRAINED_IDS)] = np.arange(len(TRAINED_IDS))
    raw = read_images(masks, shape, "L").numpy()
    np.take(to_class, raw, out=raw)
    return read_images(images, shape), torch.from_numpy(raw), cities


def _read_cityscapes(root: Path, size: int | None) -> ImageSet:
    train, test = (_city_split(root, split, size) for split in ("train", "val"))
    return _assemble("cityscapes", train, test, CITY_CLASSES, CITY_IGNORE)


def sequence_of(name: str) -> str:
    """The film a CamVid frame comes from: what stands before the first underscore."""
    return name.split("_")[0]


def _read_camvid(root: Path, size: int | None) -> ImageSet:
    def split(name: str) -> Split:
        images = image_files(root / name)
        masks = [root / f"{name}annot" / image.name for image in images]
        lost = next((mask for mask in masks if not mask.exists()), None)
        if lost is not None:
            raise damaged(root / name, f"the mask {lost} is missing")
        shape = None if size is None else (size, size * 4 // 3)
        return read_images(images, shape), read_images(masks, shape, "L"), [sequence_of(i.name) for i in images]

    return _assemble("camvid", split("train"), split("test"), CAMVID_CLASSES, CAMVID_IGNORE)


def _read_camvid_packed(root: Path, _size: int | None) -> ImageSet:
    pack = read_archive(root / "camvid240.npz")

    def split(name: str) -> Split:
        names = pack[f"{name}_names"].tolist()
        masks = unpack_masks(pack[f"{name}annot_blob"], pack[f"{name}annot_off"])
        x = unpack(pack[f"{name}_blob"], pack[f"{name}_off"], len(names), *masks.shape[1:])
        return x, masks, [sequence_of(frame) for frame in names]

    return _assemble("camvid", split("train"), split("test"), CAMVID_CLASSES, CAMVID_IGNORE)


FORMS = {
    "cityscapes": (
        Form(
            name="leftImg8bit and gtFine",
            roots=("cityscapes", "Cityscapes"),
            files=("leftImg8bit/train", "leftImg8bit/val", "gtFine/train", "gtFine/val"),
            read=_read_cityscapes,
        ),
    ),
    "camvid": (
        Form(
            name="SegNet's folders",
            roots=("CamVid", "camvid"),
            files=("train", "trainannot", "test", "testannot"),
            read=_read_camvid,
        ),
        Form(name="packed", files=("camvid240.npz",), read=_read_camvid_packed, packed=True),
    ),
}
