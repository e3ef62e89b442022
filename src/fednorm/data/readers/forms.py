"""How a data set lies on disk, and the errors when it does not."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fednorm.data.image_set import ImageSet
from fednorm.data.sources import how_to_get
from fednorm.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Form:
    """One way a set may lie in the data folder.

    `roots` are the places looked at, in order; the form is there when every one of `files` exists below one of them,
    plain or with `.gz`. `read` gets that root and the wanted image size (None: the set's own).
    """

    name: str
    files: tuple[str, ...]
    read: Callable[[Path, int | None], ImageSet]
    roots: tuple[str, ...] = (".",)
    packed: bool = False

    def find(self, folder: Path) -> Path | None:
        """The first root that holds every file."""
        for root in self.roots:
            if all(plain_or_gz(folder / root / file) for file in self.files):
                return folder / root
        return None


def plain_or_gz(path: Path) -> Path | None:
    """The file itself or its gzipped twin, whichever exists."""
    return next((found for found in (path, path.with_name(path.name + ".gz")) if found.exists()), None)


def missing(name: str, folder: Path, forms: Sequence[Form]) -> ConfigError:
    """The error for a set that is not in the folder: what was expected, and how to get it."""
    first = forms[0]
    paths = [str(Path(folder, form.roots[0], form.files[0])) for form in forms]
    more = " ..." if len(first.files) > 1 else ""
    others = f" (or {' or '.join(paths[1:])})" if paths[1:] else ""
    return ConfigError(
        f"{name} was not found in {folder}; expected {paths[0]}{more}{others}; {how_to_get(name, str(folder))}"
    )


def lines_of(listing: Path) -> list[str]:
    """The lines of a list that came with a set."""
    try:
        return listing.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise damaged(listing, f"it is not UTF-8 text (byte {error.start})") from None


def below(root: Path, name: str, listing: Path) -> Path:
    """A file that a list names below a folder: lists come with the data, and data may be anybody's."""
    # By the text alone: a set has many thousands of files, and each would be looked up folder by folder.
    plain = os.path.normpath(name)
    if os.path.isabs(plain) or plain.split(os.sep)[0] == os.pardir:
        raise damaged(listing, f"'{name}' points out of {root}")
    return root / plain


def damaged(path: Path, problem: str) -> ConfigError:
    """The error for a file that is not what its name says."""
    return ConfigError(f"{path} is damaged: {problem}; delete it and get it again")
