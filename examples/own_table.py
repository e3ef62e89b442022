"""Your own table: a CSV file with a target and a client column, looked at, trained on and exported.

python examples/own_table.py                                  # makes a small table first
python examples/own_table.py FILE.csv TARGET CLIENT_COLUMN    # takes yours; Parquet with pip install "fednorm[table]"
"""

from __future__ import annotations

import csv
import shlex
import sys
import tempfile
from pathlib import Path

import numpy as np

from fednorm.cli import exit_code

HEADER = ("age", "pressure", "smoker", "hospital", "sick")


def make_table(path: Path, each: int = 60) -> None:
    """Patients of three hospitals, whose devices do not agree on the pressure."""
    draw = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(HEADER)
        for hospital, offset in (("north", 0), ("south", 15), ("west", -20)):
            for _ in range(each):
                age, pressure, smoker = draw.integers(20, 90), draw.normal(130, 15), draw.random() < 0.3
                risk = (age - 55) / 20 + (pressure - 130) / 15 + smoker
                words = ("yes" if smoker else "no", hospital, "yes" if risk > 0.3 else "no")
                writer.writerow((age, f"{pressure + offset:.1f}", *words))


def command(line: str) -> None:
    """Do what a shell would."""
    print(f"\n$ fednorm {line}")
    code = exit_code(shlex.split(line))
    if code:
        sys.exit(code)


def main(table: str | None = None, target: str = "sick", client_column: str = "hospital") -> None:
    with tempfile.TemporaryDirectory() as place:
        if table is None:
            table = f"{place}/patients.csv"
            make_table(Path(table))
        runs = f"{place}/runs"
        columns = f"--target {target} --client-column {client_column}"
        command(f"data check table:{table} {columns}")
        # Each client by its own mean and deviation: no statistics leave it, and the devices' offsets are gone.
        settings = "--set data.standardize=client --rounds 10 --set engine.threads=1 --quiet"
        command(f"compare fedavg fedbn --data table:{table} {columns} {settings} --out {runs}")
        command(f"export {runs}/fedbn-seed0 --client 0")


if __name__ == "__main__":
    main(*sys.argv[1:4])
