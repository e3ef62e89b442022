"""Your own images: DIR/CLIENT/CLASS/image, looked at, trained on and exported from the command line.

python examples/own_images.py          # makes a small folder first: two shapes as seen by three cameras
python examples/own_images.py DIR      # takes yours

Needs Pillow: pip install "fednorm[data]"
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from pathlib import Path

import numpy as np

from fednorm.cli import exit_code

CAMERAS = {"bright": 120, "dark": 0, "middling": 60}


def make_images(root: Path, each: int = 20) -> None:
    """Noisy bars that lie or stand; every camera has a brightness of its own, which is what FedBN is for."""
    from PIL import Image

    draw = np.random.default_rng(0)
    for camera, brightness in CAMERAS.items():
        for shape in ("lying", "standing"):
            folder = root / camera / shape
            folder.mkdir(parents=True)
            for number in range(each):
                pixels = draw.integers(0, 40, (16, 16)) + brightness
                at = draw.integers(2, 12)
                bar = (slice(at, at + 3), slice(None)) if shape == "lying" else (slice(None), slice(at, at + 3))
                pixels[bar] += 60
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")


def command(line: str) -> None:
    """Do what a shell would."""
    print(f"\n$ fednorm {line}")
    code = exit_code(shlex.split(line))
    if code:
        sys.exit(code)


def main(images: str | None = None) -> None:
    with tempfile.TemporaryDirectory() as place:
        if images is None:
            images = f"{place}/images"
            make_images(Path(images))
        runs = f"{place}/runs"
        command(f"data check folder:{images}")
        settings = "--rounds 5 --local-steps 5 --batch-size 8 --set engine.threads=1 --quiet"
        command(f"compare fedavg fedbn --data folder:{images} {settings} --out {runs}")
        client = sorted(path.name for path in Path(images).iterdir() if path.is_dir())[0]
        command(f"export {runs}/fedbn-seed0 --client {client}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
