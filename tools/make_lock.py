"""Write locks/: every version that constraints.txt and constraints-nvflare.txt pin, with the hashes of its files.

`make lock` runs it. uv asks the package index for the hashes. torch has files of its own: the build for CPUs alone is
no file of the index, and pip would prefer one whose hash the index tells. Its hash is that of the wheel in a folder
that PIP_FIND_LINKS names; without one, locks/torch_cpu.txt stays as it is.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
APART = {"triton.txt": "triton==3.9.0\nml-dtypes==0.6.0\n"}
"""What the tests of kernels install beside all else: bfloat16 is a type of numpy's with the second."""
LOCKS = ROOT / "locks"
HEAD = "# Versions of {} with the hashes of their files; `make lock` writes it.\n"
NVFLARE = "constraints-nvflare.txt"


def hashed(constraints: Path) -> list[str]:
    """The pins with hashes from the index, one text each."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "lock.txt"
        uv = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-deps", "--generate-hashes", "--no-header"]
        subprocess.run([*uv, "--no-annotate", str(constraints), "--output-file", str(target)], check=True)  # noqa: S603
        lines = target.read_text().splitlines(keepends=True)
    starts = [number for number, line in enumerate(lines) if not line.startswith(" ")]
    return ["".join(lines[start:end]) for start, end in zip(starts, [*starts[1:], len(lines)], strict=True)]


def cpu_builds() -> dict[str, list[str]]:
    """The hashes of torch's CPU builds in local folders, by version."""
    found: dict[str, list[str]] = {}
    for folder in os.environ.get("PIP_FIND_LINKS", "").split():
        for wheel in sorted(Path(folder).glob("torch-*+cpu-*.whl")):
            version = wheel.name.split("-")[1]
            found.setdefault(version, []).append(hashlib.sha256(wheel.read_bytes()).hexdigest())
    return found


def main() -> None:
    pins = hashed(ROOT / "constraints.txt")
    LOCKS.mkdir(exist_ok=True)
    is_torch = [pin.startswith("torch==") for pin in pins]
    files = {"torch.txt": [pin for pin, is_it in zip(pins, is_torch, strict=True) if is_it]}
    files["requirements.txt"] = [pin for pin, is_it in zip(pins, is_torch, strict=True) if not is_it]
    version = files["torch.txt"][0].split()[0] + "+cpu"
    if hashes := cpu_builds().get(version.removeprefix("torch==")):
        files["torch_cpu.txt"] = [" \\\n    ".join([version, *(f"--hash=sha256:{each}" for each in hashes)]) + "\n"]
    files["nvflare.txt"] = hashed(ROOT / NVFLARE)
    with tempfile.TemporaryDirectory() as folder:
        for name, pin in APART.items():
            (Path(folder) / name).write_text(pin)
            files[name] = hashed(Path(folder) / name)
    for name, texts in files.items():
        source = NVFLARE if name == "nvflare.txt" else "constraints.txt"
        (LOCKS / name).write_text(HEAD.format(source) + "".join(texts))


if __name__ == "__main__":
    main()
