"""What the locks pin: names, versions and hashes, for the tools that tell of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

LOCKS = Path(__file__).resolve().parent.parent / "locks"
OF_DEVELOPERS = ("requirements.txt", "torch.txt")
"""The locks of what `make` installs, in which every package is once."""


class Pin(NamedTuple):
    """A version of a package and the hashes its files may have."""

    name: str
    version: str
    hashes: tuple[str, ...]


def pins() -> list[Pin]:
    """Every package of the locks, by name."""
    found = []
    for name in OF_DEVELOPERS:
        text = (LOCKS / name).read_text()
        for each in re.finditer(r"^([\w.-]+)==(\S+)((?: \\\n    --hash=sha256:\w+)+)", text, flags=re.MULTILINE):
            found.append(Pin(each[1], each[2], tuple(re.findall(r"sha256:(\w+)", each[3]))))
    return sorted(found)
