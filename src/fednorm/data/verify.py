"""The truth about a data set: what it is, whether it is here, and whether its bytes are right."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from fednorm.data.fetch import md5_of
from fednorm.data.load import EMBEDDED, data_folder, find_dataset, load_dataset, locate
from fednorm.data.readers.cifar import CIFAR10_MD5
from fednorm.data.readers.forms import plain_or_gz
from fednorm.data.registry import DIGIT_DOMAINS
from fednorm.data.sources import DOWNLOADS, how_to_get
from fednorm.errors import ConfigError, FednormError


def describe_dataset(name: str, data_dir: str | Path | None = None) -> dict[str, object]:
    """What is known of the set, and what lies in the data folder; reads no image.

    `here` is True when a whole form of it was found; `form`, `path` and `bytes` then say which, where and how large.
    """
    info = find_dataset(name)
    facts: dict[str, object] = {**asdict(info), "here": False, "form": None, "path": None, "bytes": 0, "get": ""}
    if info.embedded:
        path = EMBEDDED / f"{info.name}.npz.xz"
        return facts | {"here": True, "form": "embedded", "path": str(path), "bytes": path.stat().st_size}
    try:
        folder = data_folder(info.name, data_dir)
    except ConfigError:
        return facts | {"get": how_to_get(info.name, "DIR")}
    if info.name == "digits_five":
        parts = {part: describe_dataset(part, folder) for part in DIGIT_DOMAINS}
        lost = [part for part, known in parts.items() if not known["here"]]
        if lost:
            return facts | {"get": f"parts missing: {', '.join(lost)}"}
        size = sum(int(str(known["bytes"])) for known in parts.values())
        return facts | {"here": True, "form": "five parts", "path": str(folder), "bytes": size}
    found = locate(info.name, folder)
    if found is None:
        return facts | {"get": how_to_get(info.name, str(folder))}
    form, root = found
    files = [path for file in form.files if (path := plain_or_gz(root / file)) is not None]
    return facts | {"here": True, "form": form.name, "path": str(root), "bytes": sum(map(_bytes_below, files))}


def _bytes_below(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*")) if path.is_dir() else path.stat().st_size


def verify(name: str, data_dir: str | Path | None = None) -> dict[str, object]:
    """Read the whole set and check it: published MD5s where there are any, counts, label range, image form.

    `ok` is False and `problem` says why when a check fails; a set that is not here raises as loading it does.
    """
    info = find_dataset(name)
    facts = describe_dataset(name, data_dir)
    checks: list[str] = []
    try:
        checks += _checksums(info.name, None if info.embedded else data_folder(info.name, data_dir))
        image_set = load_dataset(name, data_dir)
    except FednormError as error:
        if not facts["here"]:
            raise
        return facts | {"ok": False, "checks": checks, "problem": str(error)}
    counts = (len(image_set.train_y), len(image_set.test_y))
    checks.append(f"{counts[0]} training and {counts[1]} test examples")
    problem = ""
    for split, y in (("training", image_set.train_y), ("test", image_set.test_y)):
        valid = y[y != image_set.ignore_index]
        low, high = int(valid.min()), int(valid.max())
        checks.append(f"{split} labels {low} to {high}")
        if low < 0 or high >= image_set.num_classes:
            problem = f"{split} labels run from {low} to {high}, expected 0 to {image_set.num_classes - 1}"
    checks.append(f"images {' x '.join(map(str, image_set.train_x.shape[1:]))}")
    return facts | {"ok": not problem, "checks": checks, "problem": problem}


def _checksums(name: str, folder: Path | None) -> list[str]:
    """Compare every file that has a published MD5 and is here; the first wrong one raises."""
    known: dict[Path, str] = {}
    if folder is not None:
        known = {folder / item.path: item.md5 for item in DOWNLOADS.get(name, ()) if not item.unpack}
        if name == "cifar10":
            known |= {folder / "cifar-10-batches-bin" / file: md5 for file, md5 in CIFAR10_MD5.items()}
    right = []
    for path, md5 in known.items():
        if not path.exists():
            continue
        if (found := md5_of(path)) != md5:
            raise ConfigError(f"{path} has MD5 {found}, expected {md5}; delete it and get it again")
        right.append(f"MD5 of {path.name}")
    return right
