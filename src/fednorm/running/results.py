"""What came out of a run, computed from its rows alone, and how it is told."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PROTOCOLS = ("pooled", "own_client", "domains", "unseen")


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds."""

    mean: float
    std: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.1f} ± {self.std:.1f}" if self.count > 1 else f"{self.mean:.1f}"


def spread(values: Iterable[float]) -> Spread:
    """Mean and spread of some numbers.

    >>> str(spread([1.0, 3.0])), str(spread([2.0]))
    ('2.0 ± 1.4', '2.0')
    """
    listed = list(values)
    mean = math.fsum(listed) / len(listed)
    variance = math.fsum((value - mean) ** 2 for value in listed) / max(1, len(listed) - 1)
    return Spread(mean, math.sqrt(variance), len(listed))


def summarise(
    rows: Sequence[Mapping[str, Any]],
    *,
    method: str,
    seed: int,
    rounds: int,
    metric: str,
    digest: str,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """One run as result.json holds it: final, best-validation and peak scores, curves, bytes and seconds."""
    scored = [row for row in rows if "eval" in row]
    final = scored[-1]["eval"] if scored else {}
    protocols = [name for name in (*PROTOCOLS, "validation") if name in final]
    curves = {"round": [row["round"] for row in scored]} | {
        name: [row["eval"][name][metric] for row in scored] for name in protocols
    }
    best = None
    if "validation" in curves:
        place = max(range(len(scored)), key=lambda i: (curves["validation"][i], -i))
        best = {"round": curves["round"][place]} | {name: scored[place]["eval"][name] for name in protocols}
    peak = {
        name: {"round": curves["round"][place], metric: curves[name][place]}
        for name in protocols
        if name != "validation"
        for place in [max(range(len(scored)), key=lambda i: (curves[name][i], -i))]
    }
    return {
        "method": method,
        "seed": seed,
        "rounds": rounds,
        "rounds_done": len(rows),
        "metric": metric,
        "final": final,
        "best_validation": best,
        "peak": peak,
        "curves": curves,
        "bytes": {
            "up": sum(row["bytes_up"] for row in rows),
            "down": sum(row["bytes_down"] for row in rows),
            "per_round": rows[-1]["bytes_up"] + rows[-1]["bytes_down"] if rows else 0,
        },
        "refused": sum(len(row.get("refused", {})) for row in rows),
        "seconds": round(math.fsum(row["seconds"] for row in rows), 3),
        "notes": list(notes),
        "digest": digest,
    }


@dataclass(frozen=True)
class Result:
    """The outcome of one or more runs."""

    runs: tuple[dict[str, Any], ...]
    folder: str | None = None

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(run["method"] for run in self.runs))

    @property
    def metric(self) -> str:
        return self.runs[0]["metric"]

    @property
    def curves(self) -> dict[str, Any]:
        """The curves of the only run; with several runs look into `runs`."""
        return self.runs[0]["curves"]

    def of(self, method: str) -> list[dict[str, Any]]:
        """The runs of one method, one per seed."""
        return [run for run in self.runs if run["method"] == method]

    def final(self, method: str | None = None, protocol: str = "pooled") -> Spread:
        """Final score of a method, over its seeds."""
        runs = self.of(method or self.methods[0])
        return spread(run["final"][protocol][self.metric] for run in runs if protocol in run["final"])

    def table(self) -> list[dict[str, Any]]:
        """One line a method: mean and spread by protocol, bytes a round, seconds."""
        lines = []
        for method in self.methods:
            runs = self.of(method)
            line: dict[str, Any] = {"method": method, "seeds": [run["seed"] for run in runs]}
            for protocol in PROTOCOLS:
                if all(protocol in run["final"] for run in runs):
                    found = self.final(method, protocol)
                    line[protocol] = {"mean": found.mean, "std": found.std, "n": found.count}
            line["how"] = runs[0]["final"]["pooled"]["how"]
            line["bytes_per_round"] = runs[0]["bytes"]["per_round"]
            line["seconds"] = round(math.fsum(run["seconds"] for run in runs), 3)
            lines.append(line)
        return lines

    def to_json(self) -> dict[str, Any]:
        return {"version": 1, "runs": list(self.runs), "table": self.table()}

    def __str__(self) -> str:
        lines = self.table()
        protocols = [name for name in PROTOCOLS if any(name in line for line in lines)]
        rows = [["method", *protocols, "kB/round"]]
        for line in lines:
            cells = [cell_text(line.get(name)) for name in protocols]
            rows.append([line["method"], *cells, f"{line['bytes_per_round'] / 1e3:.1f}"])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)


def cell_text(cell: Mapping[str, Any] | None) -> str:
    """A cell of the table as text.

    >>> cell_text({"mean": 54.25, "std": 1.04, "n": 2}), cell_text(None)
    ('54.2 ± 1.0', '-')
    """
    return str(Spread(cell["mean"], cell["std"], cell["n"])) if cell else "-"
