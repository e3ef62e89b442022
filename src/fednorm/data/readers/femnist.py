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
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise damaged(path, f"not LEAF's JSON ({error!r})") from error
    if not codes:
        raise damaged(folder, "no JSON file with examples in it")
    return torch.from_numpy(np.concatenate(images))[:, None], torch.tensor(codes), writers


def _read(root: Path, _size: int | None) -> ImageSet:
    train, test = _read_split(root / "train"), _read_split(root / "test")
    found = ImageSet.of("femnist", train[:2], test[:2], CLASSES, mean=(0.5,), std=(0.5,))
    return found.with_domains(train[2], test[2])


FORMS = {"femnist": (Form(name="LEAF JSON", roots=("femnist", "femnist/data"), files=("train", "test"), read=_read),)}
