"""Data sets by name, from the package itself or from the user's data folder."""

from __future__ import annotations

import os
from pathlib import Path

from fednorm.data.from_files.source import NAMES, find_source
from fednorm.data.image_opening import BadImage
from fednorm.data.image_set import ImageSet
from fednorm.data.readers import cifar, digits, domains, femnist, folders, idx, segmentation
from fednorm.data.readers.forms import Form, damaged, missing
from fednorm.data.readers.packed import read_archive
from fednorm.data.registry import DATASETS, DIGIT_DOMAINS, DatasetInfo
from fednorm.data.sources import how_to_get
from fednorm.errors import ConfigError, FednormError, first_line, unknown

EMBEDDED = Path(__file__).parent / "embedded"
FORMS: dict[str, tuple[Form, ...]] = (
    idx.FORMS | cifar.FORMS | digits.FORMS | domains.FORMS | folders.FORMS | segmentation.FORMS | femnist.FORMS
)


def find_dataset(name: str) -> DatasetInfo:
    """The set of that name; `digits-five` means `digits_five`."""
    if find_source(name) is not None:
        raise ConfigError(f"'{name}' is data of your own; look at it with: fednorm data check {name}")
    info = DATASETS.get(name.replace("-", "_"))
    if info is None and (":" in name or os.sep in name):
        raise ConfigError(f"data '{name}' is not known; data of your own are {NAMES}")
    if info is None:
        raise unknown("data set", name, DATASETS, "fednorm datasets")
    return info


def data_folder(name: str, data_dir: str | Path | None) -> Path:
    """The folder given, else the one of the environment variable FEDNORM_DATA."""
    folder = data_dir or os.environ.get("FEDNORM_DATA")
    if not folder:
        raise ConfigError(
            f"{name} needs a data folder: give --data-dir DIR or set FEDNORM_DATA; {how_to_get(name, 'DIR')}"
        )
    if Path(folder).is_file():
        raise ConfigError(f"data folder '{folder}' is a file; give the folder in which the data sets are")
    return Path(folder)


def locate(name: str, folder: Path) -> tuple[Form, Path] | None:
    """The first form of the set that lies in the folder, with the folder it lies in."""
    return next(((form, root) for form in FORMS[name] if (root := form.find(folder)) is not None), None)


def load_dataset(
    name: str, data_dir: str | Path | None = None, *, size: int | None = None, check: bool = True
) -> ImageSet:
    """Read a data set; `data_dir` defaults to the environment variable FEDNORM_DATA.

    `size` is the height that images are brought to; photographs in class folders are made square. With `check` the
    number of examples must be that of the full distribution, or of its packed form.
    """
    info = find_dataset(name)
    if size is not None and size < 1:
        raise ConfigError(f"size must be at least 1 pixel, not {size}")
    if info.embedded:
        embedded = idx.grey_set(info.name, read_archive(EMBEDDED / f"{info.name}.npz.xz"))
        return embedded if size is None else embedded.resized(size)
    folder = data_folder(info.name, data_dir)
    if info.name == "digits_five":
        five = digits.digits_five({part: load_dataset(part, folder, check=check) for part in DIGIT_DOMAINS})
        return five if size is None else five.resized(size)
    found = locate(info.name, folder)
    if found is None:
        if info.name in cifar.PICKLED:
            cifar.refuse_pickles(info.name, folder)
        raise missing(info.name, folder, FORMS[info.name])
    form, root = found
    image_set = _read(form, root, size)
    if check:
        check_counts(info, image_set, root, form)
    return image_set if size is None else image_set.resized(size)


def _read(form: Form, root: Path, size: int | None) -> ImageSet:
    """What a form's reader makes of the files; whatever they hold, the error is one line."""
    try:
        return form.read(root, size)
    except FednormError:
        raise
    except MemoryError:
        raise ConfigError(f"{root} does not fit into memory; take a smaller size or a larger machine") from None
    except BadImage as bad:
        raise damaged(root, f"an image in it {bad}") from None
    except Exception as error:
        raise damaged(root, f"{type(error).__name__}: {first_line(error)}") from error


def check_counts(info: DatasetInfo, image_set: ImageSet, root: Path, form: Form) -> None:
    """Refuse a set with more or fewer examples than it should have."""
    expected = info.packed_counts if form.packed and info.packed_counts else info.counts
    got = (len(image_set.train_y), len(image_set.test_y))
    if expected and got != expected:
        raise ConfigError(
            f"{info.name} in {root} has {got[0]} training and {got[1]} test examples, expected {expected[0]} and "
            f"{expected[1]}; get it again, or read it as it is with check=False"
        )
