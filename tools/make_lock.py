"""Write requirements.lock: every version that constraints.txt pins, with the hashes of its files.

`make lock` runs it. uv asks the package index for the hashes; wheels in the folders that PIP_FIND_LINKS names, such as
a build of torch for CPUs alone, have theirs added.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "requirements.lock"
HEAD = (
    "# The versions of constraints.txt with the hashes of their files, for `pip install --require-hashes`: make lock\n"
)


def name_of(requirement: str) -> str:
    """A package's name in its one spelling."""
    return re.sub(r"[-_.]+", "-", re.split(r"[=\s]", requirement)[0]).lower()


def hashed(constraints: Path) -> str:
    """The pins with hashes from the index."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "lock.txt"
        uv = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-deps", "--generate-hashes", "--no-header"]
        subprocess.run([*uv, "--no-annotate", str(constraints), "--output-file", str(target)], check=True)  # noqa: S603
        return target.read_text()


def local_hashes() -> dict[str, list[str]]:
    """The hashes of wheels in local folders, by name==version without a local part."""
    found: dict[str, list[str]] = {}
    for folder in os.environ.get("PIP_FIND_LINKS", "").split():
        for wheel in sorted(Path(folder).glob("*.whl")):
            name, version = wheel.name.split("-")[:2]
            pin = f"{name_of(name)}=={version.partition('+')[0]}"
            found.setdefault(pin, []).append(hashlib.sha256(wheel.read_bytes()).hexdigest())
    return found


def main() -> None:
    text = hashed(ROOT / "constraints.txt")
    for pin, hashes in local_hashes().items():
        for each in hashes:
            if each not in text:
                text = text.replace(f"{pin} \\\n", f"{pin} \\\n    --hash=sha256:{each} \\\n")
    LOCK.write_text(HEAD + text)


if __name__ == "__main__":
    main()
