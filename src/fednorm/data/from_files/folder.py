"""Images in folders: DIR/CLIENT/CLASS/image, or DIR/CLIENT/{train,test}/CLASS/image."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from fednorm.data.from_files.file_set import OPEN, TEST, TRAIN, FileOptions, FileSet
from fednorm.data.from_files.pictures import SUFFIXES, read_pictures
from fednorm.data.from_files.problems import listed, refuse
from fednorm.data.from_files.scaling import with_image_scale
from fednorm.data.from_files.source import Source
from fednorm.errors import ConfigError

LAYOUT = "CLIENT/CLASS/image, or CLIENT/{train,test}/CLASS/image"
SPLITS = {"train": TRAIN, "test": TEST}


@dataclass(frozen=True)
class Picture:
    """One image file: whose it is, of which class, and what for."""

    path: Path
    client: str
    label: str
    split: int


def read_folder(source: Source, options: FileOptions) -> FileSet:
    """Find all images, decide on one size and one number of channels, and read them."""
    pictures, strays = scan(source)
    # Those for training first: they are then a slice of all, where nothing is left to be drawn.
    pictures.sort(key=lambda picture: (picture.split == TEST, picture.client, str(picture.path)))
    classes = sorted({picture.label for picture in pictures})
    clients = sorted({picture.client for picture in pictures})
    x = read_pictures([picture.path for picture in pictures], options.size, source)
    label_of = {name: number for number, name in enumerate(classes)}
    client_of = {name: number for number, name in enumerate(clients)}
    ignored = f"{len(strays)} file{'s' if len(strays) > 1 else ''} that are no images ignored: {listed(strays, 3)}"
    return FileSet(
        name=str(source),
        x=x,
        y=torch.tensor([label_of[picture.label] for picture in pictures]),
        split=torch.tensor([picture.split for picture in pictures], dtype=torch.int8),
        client=torch.tensor([client_of[picture.client] for picture in pictures]),
        client_names=tuple(clients),
        classes=tuple(classes),
        num_classes=len(classes),
        form="images",
        finish=with_image_scale,
        notes=(ignored,) if strays else (),
    )


def scan(source: Source) -> tuple[list[Picture], list[str]]:
    """All images below the folder, and the files there that are none; hidden files count for nothing."""
    root = source.path
    if not root.exists():
        raise ConfigError(f"'{root}' does not exist; expected a folder with {LAYOUT}")
    if not root.is_dir():
        raise ConfigError(f"'{root}' is a file; expected a folder with {LAYOUT}")
    found = _Found(root.resolve())
    clients = found.folders(root)
    for client in clients:
        inner = found.folders(client)
        if inner and {folder.name for folder in inner} <= SPLITS.keys():
            for split in inner:
                found.classes(client.name, split, SPLITS[split.name])
        else:
            found.classes(client.name, client, OPEN)
    if not clients:
        found.problems.append(f"'{root}' has no folders; expected {LAYOUT} below it")
    refuse(found.problems, source)
    return found.pictures, found.strays


class _Found:
    """What a walk through the folders has come across."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.pictures: list[Picture] = []
        self.strays: list[str] = []
        self.problems: list[str] = []

    def _entries(self, folder: Path) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as entries:
                seen = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda e: e.name)
        except OSError as error:
            self.problems.append(f"'{folder}' cannot be read: {error.strerror}; give yourself the right to read it")
            return []
        return [entry for entry in seen if self._inside(entry)]

    def _inside(self, entry: os.DirEntry[str]) -> bool:
        """A link may point to another place in the folder, never out of it: data would depend on what is elsewhere."""
        if not entry.is_symlink() or Path(entry.path).resolve().is_relative_to(self.root):
            return True
        self.problems.append(f"'{entry.path}' is a link to a place outside of '{self.root}'; put the files themselves")
        return False

    def folders(self, folder: Path) -> list[Path]:
        """The folders in a folder; files beside them are strays."""
        entries = self._entries(folder)
        self.strays += [entry.name for entry in entries if not entry.is_dir() and not is_image(entry.name)]
        images = [entry.name for entry in entries if not entry.is_dir() and is_image(entry.name)]
        if images:
            self.problems.append(
                f"'{folder}' holds images itself, such as {images[0]}; expected {LAYOUT} below '{self.root}'"
            )
        return [Path(entry.path) for entry in entries if entry.is_dir()]

    def classes(self, client: str, folder: Path, split: int) -> None:
        """The images of one client, or of its training or test part, class by class."""
        before, problems = len(self.pictures), len(self.problems)
        inner = self._entries(folder)
        names = [entry.name for entry in inner if entry.is_dir()]
        for name in names:
            label = folder / name
            entries = self._entries(label)
            deeper = [entry.name for entry in entries if entry.is_dir()]
            if deeper:
                self.problems.append(
                    f"'{label}' holds folders ({listed(deeper, 3)}) where images were expected: "
                    f"{LAYOUT} below '{self.root}'"
                )
            for entry in entries:
                if is_image(entry.name) and not entry.is_dir():
                    self.pictures.append(Picture(Path(entry.path), client, name, split))
                elif not entry.is_dir():
                    self.strays.append(entry.name)
        if len(self.pictures) == before and len(self.problems) == problems:
            what = f"class folders without images: {listed(names, 3)}" if names else "no class folders"
            self.problems.append(
                f"client '{client}' has {what} in '{folder}'; expected {LAYOUT} (images end in "
                f"{listed(sorted(SUFFIXES), 4)})"
            )


def is_image(name: str) -> bool:
    """Whether a file is taken for an image, by the end of its name."""
    return Path(name).suffix.lower() in SUFFIXES
