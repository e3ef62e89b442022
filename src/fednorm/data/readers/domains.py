"""Office-Caltech10, DomainNet (ten classes) and PACS: class folders by domain, split lists, or packed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fednorm.core import rng
from fednorm.data.image_set import ImageSet
from fednorm.data.partition import largest_remainder
from fednorm.data.readers.forms import Form, below, lines_of
from fednorm.data.readers.images import class_folders, image_files, read_images
from fednorm.data.readers.packed import labels, read_archive, unpack
from fednorm.data.registry import DOMAINNET_DOMAINS, OFFICE_DOMAINS, PACS_DOMAINS

DOMAINNET_CLASSES = (
    "bird",
    "feather",
    "headphones",
    "ice_cream",
    "teapot",
    "tiger",
    "whale",
    "windmill",
    "wine_glass",
    "zebra",
)
TEST_SHARE = 0.2
HALF = (0.5, 0.5, 0.5)


def held_out(name: str, y: np.ndarray, domain: np.ndarray) -> np.ndarray:
    """True for test rows: a fifth of every domain, rounded up, with the domain's class mix, drawn by a fixed key."""
    test = np.zeros(len(y), dtype=bool)
    for value in np.unique(domain):
        rows = np.flatnonzero(domain == value)
        draw = np.random.default_rng(rng.as_seed(rng.key("split", name, int(value))))
        classes, counts = np.unique(y[rows], return_counts=True)
        quotas = largest_remainder(counts.astype(np.float64), math.ceil(TEST_SHARE * len(rows)))
        for label, quota in zip(classes, quotas, strict=True):
            test[draw.permutation(rows[y[rows] == label])[:quota]] = True
    return test


def _assemble(
    name: str, x: Tensor, y: Tensor, domain: Tensor, test: np.ndarray, classes: Sequence[str], domains: Sequence[str]
) -> ImageSet:
    rows = torch.from_numpy(test)
    return ImageSet(
        name=name,
        train_x=x[~rows],
        train_y=y[~rows],
        test_x=x[rows],
        test_y=y[rows],
        num_classes=len(classes),
        classes=tuple(classes),
        mean=HALF,
        std=HALF,
        train_domain=domain[~rows],
        test_domain=domain[rows],
        domain_names=tuple(domains),
    )


def _packed_form(name: str, file: str, size: int) -> Form:
    def read(root: Path, _size: int | None) -> ImageSet:
        pack = read_archive(root / file)
        x = unpack(pack["blob"], pack["off"], len(pack["y"]), size, size)
        test = held_out(name, pack["y"], pack["domain"])
        y, domain = labels(pack["y"]), labels(pack["domain"])
        return _assemble(name, x, y, domain, test, pack["classes"].tolist(), pack["domains"].tolist())

    return Form(name="packed", files=(file,), read=read, packed=True)


def _listed(root: Path, domain: str, split: str, classes: Sequence[str]) -> list[tuple[Path, int]]:
    """The images of a split list that belong to these classes; lines are `path label`."""
    found: list[tuple[Path, int]] = []
    listing = root / f"{domain}_{split}.txt"
    for line in lines_of(listing):
        path = below(root, line.rsplit(" ", 1)[0], listing)
        if path.parent.name in classes:
            found.append((path, classes.index(path.parent.name)))
    return found


def _tree_form(
    name: str, roots: tuple[str, ...], domains: tuple[str, ...], size: int, classes: tuple[str, ...] = ()
) -> Form:
    def read(root: Path, wanted: int | None) -> ImageSet:
        known = classes or tuple(class_folders(root / domains[0]))
        entries: list[tuple[Path, int, int, bool]] = []
        for number, domain in enumerate(domains):
            if all((root / f"{domain}_{split}.txt").exists() for split in ("train", "test")):
                for split in ("train", "test"):
                    entries += [(p, k, number, split == "test") for p, k in _listed(root, domain, split, known)]
                continue
            tree = [(p, k) for k, label in enumerate(known) for p in image_files(root / domain / label)]
            codes = np.array([k for _, k in tree])
            test = held_out(f"{name}/{domain}", codes, np.zeros(len(tree), dtype=np.int64))
            entries += [(p, k, number, bool(t)) for (p, k), t in zip(tree, test, strict=True)]
        side = wanted or size
        x = read_images([entry[0] for entry in entries], (side, side))
        y, domain_of = (torch.tensor([entry[i] for entry in entries], dtype=torch.int64) for i in (1, 2))
        return _assemble(name, x, y, domain_of, np.array([entry[3] for entry in entries]), known, domains)

    return Form(name="class folders by domain", roots=roots, files=domains, read=read)


FORMS = {
    "office_caltech10": (
        _tree_form(
            "office_caltech10", ("office_caltech_10", "OfficeCaltech10", "office_caltech10"), OFFICE_DOMAINS, 256
        ),
        _packed_form("office_caltech10", "office_caltech96.npz", 96),
    ),
    "domainnet10": (_tree_form("domainnet10", ("DomainNet", "domainnet"), DOMAINNET_DOMAINS, 256, DOMAINNET_CLASSES),),
    "pacs": (
        _tree_form("pacs", ("PACS", "PACS/kfold", "pacs"), PACS_DOMAINS, 227),
        _packed_form("pacs", "pacs64.npz", 64),
    ),
}
