"""What came out of a run, computed from its rows alone, and how it is told."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fednorm.running.records import (
    RESULT_VERSION,
    Curves,
    ResultFile,
    RoundRow,
    RunResult,
    Scores,
    TableLine,
    number_text,
    score_of,
)

PROTOCOLS = ("pooled", "own_client", "domains", "unseen")


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds."""

    mean: float
    std: float
    count: int
    percent: bool = True
    """whether the numbers are between 0 and 100"""

    def __str__(self) -> str:
        mean, std = (number_text(value, self.percent) for value in (self.mean, self.std))
        return f"{mean} ± {std}" if self.count > 1 else mean


def spread(values: Iterable[float], percent: bool = True) -> Spread:
    """Mean and spread of some numbers.

    >>> str(spread([1.0, 3.0])), str(spread([2.0]))
    ('2.0 ± 1.4', '2.0')
    """
    listed = list(values)
    mean = math.fsum(listed) / len(listed)
    variance = math.fsum((value - mean) ** 2 for value in listed) / max(1, len(listed) - 1)
    return Spread(mean, math.sqrt(variance), len(listed), percent)


def summarise(
    rows: Sequence[RoundRow],
    *,
    method: str,
    seed: int,
    rounds: int,
    metric: str,
    higher_is_better: bool = True,
    percent: bool = True,
    digest: str,
    notes: Sequence[str] = (),
) -> RunResult:
    """One run as result.json holds it: final, best-validation and peak scores, curves, bytes and seconds."""
    scored = [(row["round"], row["eval"]) for row in rows if "eval" in row]
    final: Scores = scored[-1][1] if scored else {}
    protocols = [name for name in (*PROTOCOLS, "validation") if name in final]
    by_round = {name: [score_of(scores, name, metric) for _, scores in scored] for name in protocols}
    # The first of several rounds that are equally good.
    sign = 1 if higher_is_better else -1
    best = {name: max(range(len(scored)), key=lambda i: (sign * values[i], -i)) for name, values in by_round.items()}
    best_validation: Any = None
    if "validation" in best:
        number, scores = scored[best["validation"]]
        best_validation = {"round": number, **scores}
    peak: Any = {
        name: {"round": scored[at][0], metric: by_round[name][at]} for name, at in best.items() if name != "validation"
    }
    curves: Any = {"round": [number for number, _ in scored], **by_round}
    return {
        "method": method,
        "seed": seed,
        "rounds": rounds,
        "rounds_done": len(rows),
        "metric": metric,
        "higher_is_better": higher_is_better,
        "percent": percent,
        "final": final,
        "best_validation": best_validation,
        "peak": peak,
        "curves": curves,
        "bytes": {
            "up": sum(row["bytes_up"] for row in rows),
            "down": sum(row["bytes_down"] for row in rows),
            "per_round": rows[-1]["bytes_up"] + rows[-1]["bytes_down"] if rows else 0,
        },
        "refused": sum(len(row.get("refused", {})) for row in rows),
        "seconds": round(math.fsum(row.get("seconds", 0.0) for row in rows), 3),
        "notes": list(notes),
        "digest": digest,
    }


@dataclass(frozen=True)
class Result:
    """The outcome of one or more runs."""

    runs: tuple[RunResult, ...]
    folder: str | None = None

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(run["method"] for run in self.runs))

    @property
    def metric(self) -> str:
        return self.runs[0]["metric"]

    @property
    def higher_is_better(self) -> bool:
        """Whether more of the metric is better."""
        return self.runs[0].get("higher_is_better", True)

    @property
    def percent(self) -> bool:
        """Whether the metric is between 0 and 100."""
        return self.runs[0].get("percent", True)

    @property
    def curves(self) -> Curves:
        """The curves of the only run; with several runs look into `runs`."""
        return self.runs[0]["curves"]

    def of(self, method: str) -> list[RunResult]:
        """The runs of one method, one per seed."""
        return [run for run in self.runs if run["method"] == method]

    def final(self, method: str | None = None, protocol: str = "pooled") -> Spread:
        """Final score of a method, over its seeds."""
        runs = self.of(method or self.methods[0])
        scores = (score_of(run["final"], protocol, self.metric) for run in runs if protocol in run["final"])
        return spread(scores, self.percent)

    def table(self) -> list[TableLine]:
        """One line a method: mean and spread by protocol, bytes a round, seconds."""
        lines = []
        for method in self.methods:
            runs = self.of(method)
            line: Any = {"method": method, "seeds": [run["seed"] for run in runs]}
            for protocol in PROTOCOLS:
                if all(protocol in run["final"] for run in runs):
                    found = self.final(method, protocol)
                    line[protocol] = {"mean": found.mean, "std": found.std, "n": found.count}
            line["how"] = runs[0]["final"].get("pooled", {}).get("how", "")
            line["bytes_per_round"] = runs[0]["bytes"]["per_round"]
            line["seconds"] = round(math.fsum(run["seconds"] for run in runs), 3)
            lines.append(line)
        return lines

    def to_json(self) -> ResultFile:
        return {"version": RESULT_VERSION, "runs": list(self.runs), "table": self.table()}

    def __str__(self) -> str:
        lines = self.table()
        protocols = [name for name in PROTOCOLS if any(name in line for line in lines)]
        rows = [["method", *protocols, "kB/round"]]
        for line in lines:
            cells = [cell_text(line.get(name), self.percent) for name in protocols]
            rows.append([line["method"], *cells, f"{line['bytes_per_round'] / 1e3:.1f}"])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)


def cell_text(cell: Mapping[str, Any] | None, percent: bool = True) -> str:
    """A cell of the table as text.

    >>> cell_text({"mean": 54.25, "std": 1.04, "n": 2}), cell_text(None)
    ('54.2 ± 1.0', '-')
    """
    return str(Spread(cell["mean"], cell["std"], cell["n"], percent)) if cell else "-"
