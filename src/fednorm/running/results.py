"""What came out of a run, computed from its rows alone, and how it is told."""

from __future__ import annotations

import csv
import importlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from torch import nn

from fednorm.core.method import Method
from fednorm.core.task import AnyTask
from fednorm.data.federation import Federation
from fednorm.data.given import Examples
from fednorm.errors import ConfigError, require, unknown
from fednorm.files import written_whole
from fednorm.running.over_time import is_timed, staleness_of, time_to, times_to
from fednorm.running.pictures import curves as draw_curves
from fednorm.running.records import (
    RESULT_VERSION,
    Curves,
    MeanOverSeeds,
    Ran,
    ResultFile,
    RoundRow,
    RunResult,
    Scores,
    TableLine,
    as_written,
    number_text,
    score_of,
)
from fednorm.running.trained import Trained, Which

PROTOCOLS = ("pooled", "own_client", "domains", "unseen")
_PLACES = ("round", "time")
"""Curves of where scores are, beside those of scores."""


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
    ran: Ran | None = None,
) -> RunResult:
    """One run as result.json holds it: final, best-validation and peak scores, curves, bytes and seconds."""
    scored = [(row["round"], row["eval"]) for row in rows if "eval" in row]
    final: Scores = scored[-1][1] if scored else {}
    # A run that was begun elsewhere, such as on NVFlare, may have earlier rounds without some of the last one's.
    protocols = [name for name in (*PROTOCOLS, "validation") if all(name in scores for _, scores in scored) and final]
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
    times = [row["time"] for row in rows if "eval" in row and "time" in row]
    if times:
        curves["time"] = times
    result: RunResult = {
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
    if rows and "time" in rows[-1]:
        result = {**result, "time": rows[-1]["time"], "staleness": staleness_of(rows)}
    return {**result, "ran": ran} if ran else result


@dataclass(frozen=True)
class Result:
    """The outcome of one or more runs: scores as numbers, tables, files and pictures, and the trained models."""

    runs: tuple[RunResult, ...]
    folder: str | None = None
    trained: tuple[Trained, ...] = field(default=(), repr=False, compare=False)
    """where the models of each run are, as far as that is known"""

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        method: Method | Sequence[Method] | None = None,
        model: nn.Module | None = None,
        task: AnyTask | None = None,
        clients: Sequence[Examples] | None = None,
        test: Sequence[Examples] | Examples | None = None,
        federation: Federation | None = None,
        use: Sequence[str] = (),
        allow_code: bool = False,
    ) -> Result:
        """The result of a folder whose runs have ended.

        Numbers need nothing else; for `model()` a run that was started with objects is given them again, and code
        that the folder names is allowed or named in `use`.
        """
        from fednorm.running.folder import RunFolder
        from fednorm.running.given import config_in, gathered, read_stored
        from fednorm.running.resuming import load_result  # which makes results

        told = config_in(read_stored(RunFolder(Path(folder)))).task
        methods = [] if method is None else [method] if isinstance(method, Method) else list(method)
        objects = gathered(model, clients, test, federation, None, task or told)
        return load_result(folder, objects, {each.name: each for each in methods}, use=use, allow_code=allow_code)

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

    def model(
        self,
        method: str | None = None,
        seed: int | None = None,
        *,
        client: int | str | None = None,
        which: Which = "last",
    ) -> nn.Module:
        """A trained model: a plain module on the CPU in eval mode, the network as the method's surgery left it.

        Without a client it is the global model, in which entries that stayed local are their clients' mean; `which`
        is the last or, with `keep="best"`, the best by validation. Of several runs name the method, and the seed
        where it is not the first.
        """
        if method is None and len(self.methods) > 1:
            raise ConfigError(f"there are {len(self.methods)} methods; name one: {', '.join(self.methods)}")
        runs = {(run["method"], run["seed"]): number for number, run in enumerate(self.runs)}
        if method is not None and method not in self.methods:
            raise unknown("method of this result", method, self.methods)
        name = self.methods[0] if method is None else method
        wanted = self.of(name)[0]["seed"] if seed is None else seed
        if (name, wanted) not in runs:
            raise unknown("seed of this result", wanted, [str(run["seed"]) for run in self.of(name)])
        if len(self.trained) != len(self.runs):
            raise ConfigError("this result was read without its models; use fednorm.Result.load(FOLDER)")
        return self.trained[runs[name, wanted]].model(client, which)

    def rows(self) -> list[dict[str, Any]]:
        """The metric of every run, scored round and protocol, one plain row each; on a clock with its virtual time."""
        return [
            {**_name(run), **place, "protocol": protocol, self.metric: value}
            for run in self.runs
            for protocol, values in run["curves"].items()
            if protocol not in _PLACES
            for place, value in zip(_places(run), cast("list[float]", values), strict=True)
        ]

    def _columns(self) -> list[str]:
        """What `rows()` has in its rows."""
        timed = any(is_timed(run) for run in self.runs)
        return ["method", "seed", *_PLACES[: 1 + timed], "protocol", self.metric]

    def per_client(self, protocol: str = "own_client") -> list[dict[str, Any]]:
        """The final metric of every client in every run, one plain row each."""
        return [
            {**_name(run), "client": int(client), **_client_name(run, int(client)), self.metric: value}
            for run in self.runs
            for client, value in _scores(run, protocol).get("per_client", {}).items()
        ]

    def per_class(self, protocol: str = "pooled") -> list[dict[str, Any]]:
        """The final metric of every class in every run, one plain row each; None for a class without examples."""
        return [
            {**_name(run), "class": number, self.metric: value}
            for run in self.runs
            for number, value in enumerate(_scores(run, protocol).get("per_class", []))
        ]

    def to_csv(self, path: str | Path) -> Path:
        """Write `rows()` as a CSV file."""
        rows = self.rows()
        with written_whole(Path(path)) as draft, draft.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns())
            writer.writeheader()
            writer.writerows(rows)
        return Path(path)

    def to_frame(self) -> Any:
        """`rows()` as a pandas DataFrame."""
        require("pandas", "report", "a table as a DataFrame")
        pandas = importlib.import_module("pandas")
        return pandas.DataFrame(self.rows(), columns=self._columns())

    def time_to(self, level: float, method: str | None = None, protocol: str = "pooled") -> Spread | None:
        """Virtual time until the score of a method was first at a level, over its seeds; None where one never was."""
        times = [time_to(run, level, protocol) for run in self.of(method or self.methods[0])]
        return None if None in times else spread((time for time in times if time is not None), percent=False)

    def picture(self, path: str | Path, title: str = "") -> Path:
        """Draw the curves of all methods by round, and on a clock by time, into a file, such as curves.png."""
        return draw_curves(self, path, title)

    def table(self) -> list[TableLine]:
        """One line a method: mean and spread by protocol, bytes a round, seconds, and on a clock virtual times."""
        lines = []
        for method in self.methods:
            runs = self.of(method)
            line: Any = {"method": method, "seeds": [run["seed"] for run in runs]}
            for protocol in PROTOCOLS:
                if all(protocol in run["final"] for run in runs):
                    line[protocol] = _cell(self.final(method, protocol))
            if all(is_timed(run) for run in runs):
                line["time"] = _cell(spread(run.get("time", 0.0) for run in runs))
                line["time_to"] = {level: _cell(spread(times)) for level, times in times_to(runs).items()}
            line["how"] = runs[0]["final"].get("pooled", {}).get("how", "")
            line["bytes_per_round"] = runs[0]["bytes"]["per_round"]
            line["seconds"] = round(math.fsum(run["seconds"] for run in runs), 3)
            lines.append(line)
        return lines

    def to_json(self) -> ResultFile:
        runs = [cast(RunResult, as_written(run)) for run in self.runs]
        return {"version": RESULT_VERSION, "runs": runs, "table": self.table()}

    def __str__(self) -> str:
        lines = self.table()
        protocols = [name for name in PROTOCOLS if any(name in line for line in lines)]
        timed = time_columns(lines)
        rows = [["method", *protocols, *timed, "kB/round"]]
        for number, line in enumerate(lines):
            cells = [cell_text(line.get(name), self.percent) for name in protocols]
            cells += [column[number] for column in timed.values()]
            rows.append([line["method"], *cells, f"{line['bytes_per_round'] / 1e3:.1f}"])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)


def time_columns(lines: Sequence[TableLine]) -> dict[str, list[str]]:
    """What a table says of virtual time: all of it, and that to the highest level which two methods reached."""
    if not any("time" in line for line in lines):
        return {}
    reached = [set(line.get("time_to", {})) for line in lines]
    some = {
        level for level in set[str]().union(*reached) if sum(level in each for each in reached) >= min(2, len(lines))
    }
    found = {"time": [cell_text(line.get("time"), percent=False) for line in lines]}
    if some:
        level = max(some, key=int)
        times = [line.get("time_to", {}).get(level) for line in lines]
        found[f"time to {level} %"] = [cell_text(time, percent=False) for time in times]
    return found


def _cell(found: Spread) -> MeanOverSeeds:
    return {"mean": found.mean, "std": found.std, "n": found.count}


def _name(run: RunResult) -> dict[str, Any]:
    return {"method": run["method"], "seed": run["seed"]}


def _places(run: RunResult) -> list[dict[str, float]]:
    """Of which round each score of a curve is, and on a clock of which virtual time."""
    curves: Mapping[str, Any] = run["curves"]  # pyright: ignore[reportAssignmentType]
    there = [name for name in _PLACES if name in curves]
    return [dict(zip(there, place, strict=True)) for place in zip(*(curves[name] for name in there), strict=True)]


def _client_name(run: RunResult, client: int) -> dict[str, str]:
    names = run.get("client_names")
    return {"name": names[client]} if names else {}


def _scores(run: RunResult, protocol: str) -> Mapping[str, Any]:
    return cast("Mapping[str, Mapping[str, Any]]", run["final"]).get(protocol, {})


def cell_text(cell: Mapping[str, Any] | None, percent: bool = True) -> str:
    """A cell of the table as text.

    >>> cell_text({"mean": 54.25, "std": 1.04, "n": 2}), cell_text(None)
    ('54.2 ± 1.0', '-')
    """
    return str(Spread(cell["mean"], cell["std"], cell["n"], percent)) if cell else "-"
