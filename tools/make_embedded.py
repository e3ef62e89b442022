"""Write the embedded subset of Fashion-MNIST: balanced, lossless, the same bytes on every machine.

    python tools/make_embedded.py fashion_mnist.npz.xz src/fednorm/data/embedded/fashion_mnist_small.npz.xz

The input holds x_train, y_train, x_test, y_test as uint8 arrays. Rows are drawn per class with a fixed seed and kept
in the order of the original files.
"""

from __future__ import annotations

import argparse
import io
import lzma
import zipfile
from pathlib import Path

import numpy as np

SEED = 2017
PER_CLASS = {"train": 1000, "test": 200}


def balanced_rows(labels: np.ndarray, per_class: int) -> np.ndarray:
    """The same number of rows of every class, ascending."""
    draw = np.random.default_rng(SEED)
    rows = [draw.choice(np.flatnonzero(labels == label), per_class, replace=False) for label in np.unique(labels)]
    return np.sort(np.concatenate(rows))


def pack(arrays: dict[str, np.ndarray]) -> bytes:
    """An uncompressed .npz with fixed time stamps inside one xz stream."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.save(member, array, allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0)), member.getvalue())
    return lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    with lzma.open(arguments.source) as file:
        full = np.load(io.BytesIO(file.read()), allow_pickle=False)
    arrays: dict[str, np.ndarray] = {}
    for split, per_class in PER_CLASS.items():
        rows = balanced_rows(full[f"y_{split}"], per_class)
        arrays |= {
            f"x_{split}": full[f"x_{split}"][rows],
            f"y_{split}": full[f"y_{split}"][rows],
            f"idx_{split}": rows.astype(np.int32),
        }
    arguments.target.write_bytes(pack(arrays))
    print(f"{arguments.target}: {arguments.target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
