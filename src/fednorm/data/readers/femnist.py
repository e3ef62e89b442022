"""FEMNIST as LEAF's preprocessing leaves it: JSON files of users with their images and labels."""

from __future__ import annotations

import json
import string
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fednorm.data.image_set import ImageSet
from fednorm.data.readers.forms import Form, damaged

CLASSES = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)


def _read_split(folder: Path) -> tuple[Tensor, Tensor, list[str]]:
    images: list[np.ndarray] = []
    codes: list[int] = []
    writers: list[str] = []
    files = sorted(folder.glob("*.json"))
    for path in files:
        try:
            content = json.loads(path.read_bytes())
            for user in content["users"]:
                data = content["user_data"][user]
                pixels = np.asarray(data["x"], dtype=np.float32).reshape(len(data["y"]), 28, 28)
                images.append(np.rint(pixels * 255).astype(np.uint8))
                codes += [int(label) for label in data["y"]]
                writers += [str(user)] * len(data["y"])
        except (ValueError, KeyError, TypeError) as error:
            raise damaged(path, f"not LEAF's JSON ({error!r})") from error
    if not codes:
        raise damaged(folder, "no JSON file with examples in it")
    return torch.from_numpy(np.concatenate(images))[:, None], torch.tensor(codes), writers


def _read(root: Path, _size: int | None) -> ImageSet:
    train, test = _read_split(root / "train"), _read_split(root / "test")
    names = sorted({*train[2], *test[2]})
    index = {name: number for number, name in enumerate(names)}
    return ImageSet(
        name="femnist",
        train_x=train[0],
        train_y=train[1],
        test_x=test[0],
        test_y=test[1],
        num_classes=len(CLASSES),
        classes=CLASSES,
        mean=(0.5,),
        std=(0.5,),
        train_domain=torch.tensor([index[writer] for writer in train[2]]),
        test_domain=torch.tensor([index[writer] for writer in test[2]]),
        domain_names=tuple(names),
    )


FORMS = {"femnist": (Form(name="LEAF JSON", roots=("femnist", "femnist/data"), files=("train", "test"), read=_read),)}
