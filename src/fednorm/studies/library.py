"""Results of runs, one JSON file each, found by what was run: studies that need the same run share it."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

from fednorm.errors import CheckpointError, ConfigError, first_line
from fednorm.files import disk_errors, read_json, safe_name, write_json
from fednorm.running.config import RunConfig, flat, from_dict, to_dict
from fednorm.running.probe_curves import probe_curve, probe_variance
from fednorm.running.records import RoundRow, RunResult, as_it_was, as_written

VERSION = 1
PRECISIONS = ("fp32", "tf32", "bf16")
"""The most exact first."""
PROBE_WINDOW = 200
"""Looks of a probe over which its variance is taken; rounds, where it looks at every one."""
_ELSEWHERE = ("seed", "data.dir", "data.digest", "eval.chunk", "keep", "keep_every", "use", "init_partial")
"""Fields that do not say what is computed."""
_ANEW = "move it elsewhere, and what is missing then is played again"


@cache
def key_of(config: RunConfig) -> str:
    """A digest of what a run computes, whatever its seed, its engine and its folders.

    Only fields that differ from their defaults count, so that a new field with a default keeps all results valid.
    """
    defaults = flat(RunConfig())
    told = {
        name: value
        for name, value in flat(config).items()
        if value != defaults[name] and name not in _ELSEWHERE and not name.startswith("engine.")
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Record:
    """One run with one seed, as its file holds it."""

    key: str
    config: Mapping[str, Any]
    run: RunResult
    train_loss: Mapping[str, list[float]]
    """`round` and `loss`: the mean training loss of the rounds that were scored"""
    probes: Sequence[Mapping[str, Any]]
    """what probes saw, of rounds that were scored: `round`, and `probes` with a number for each, the mean over clients;
    `NAME variance` is that of a client's numbers over the last looks"""
    client_domains: Sequence[str]
    """name of each client's domain; empty where data have none"""
    environment: Mapping[str, Any]
    """versions, commit, hardware, command"""
    statistics: Mapping[str, Any] = field(default_factory=dict)
    """running statistics of some clients, where a figure shows them"""

    @property
    def seed(self) -> int:
        return self.run["seed"]

    @property
    def precision(self) -> str:
        return self.run.get("ran", {}).get("precision", "fp32")

    @property
    def device(self) -> str:
        return self.run.get("ran", {}).get("device_name", "unknown")

    @property
    def file_name(self) -> str:
        told = f"{self.config['data']['name']}-{self.config['model']}-{self.run['method']}"
        return f"{safe_name(told)}-{self.key}-seed{self.seed}-{self.precision}.json"


class Library:
    """A folder of records."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._found = dict[str, list[Record]]()
        """what was read of each key"""
        self._read = set[str]()
        """names of the files that were"""
        self._looked = False

    def records(self, config: RunConfig) -> list[Record]:
        """Every record of a run, seed by seed, the most exact first."""
        found = self._all().get(key_of(config), [])
        return sorted(found, key=lambda record: (record.seed, PRECISIONS.index(record.precision)))

    def has(self, config: RunConfig, seed: int, precision: str | None = None) -> bool:
        """Whether a run is there, in one precision, or in the one that is shown where none is asked for."""
        return any(record.seed == seed for record in in_one_precision(self.records(config), precision))

    def make_ready(self) -> None:
        """Make the folder and write into it once, so that no run of hours ends where its result cannot be kept."""
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.folder).close()

    def save(self, record: Record) -> Path:
        """Write a record whole or not at all."""
        known = self._all().setdefault(record.key, [])
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / record.file_name
        write_json(path, {"version": VERSION, **as_written(vars(record))}, indent=1)
        self._read.add(path.name)
        known[:] = [*(each for each in known if each.file_name != record.file_name), record]
        return path

    def look_again(self) -> None:
        """Read what others have put there since."""
        if self.folder.exists() and not self.folder.is_dir():
            raise CheckpointError(f"'{self.folder}' is no folder, so it holds no results; give the folder they are in")
        for path in sorted(self.folder.glob("*.json")):
            if path.name not in self._read:
                record = _read_record(path)
                self._found.setdefault(record.key, []).append(record)
                self._read.add(path.name)
        self._looked = True

    def _all(self) -> dict[str, list[Record]]:
        if not self._looked:
            self.look_again()
        return self._found


def in_one_precision(records: Sequence[Record], precision: str | None = None) -> tuple[Record, ...]:
    """Those of one precision, which is what a mean is over: the one with most seeds, of several the most exact."""
    of_each = [tuple(record for record in records if record.precision == name) for name in PRECISIONS]
    return max(of_each, key=len) if precision is None else of_each[PRECISIONS.index(precision)]


def _read_record(path: Path) -> Record:
    """The record in a file; whatever else the file holds is refused by its name."""
    stored = read_json(path, _ANEW)
    try:
        if stored["version"] != VERSION:
            raise ValueError(f"version {stored['version']}, this fednorm reads {VERSION}")
        del stored["version"]
        record = Record(**as_it_was(stored))
        _refuse_unusable(record)
    except (AttributeError, ConfigError, LookupError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise CheckpointError(f"'{path}' is no result of a study, or is damaged ({why}); {_ANEW}") from None
    return record


def _refuse_unusable(record: Record) -> None:
    """Look at what tables and pictures take from a record, before one of them fails at it.

    That there is nothing odd about a number is not looked at, since a run may have ended with any.
    """
    run, metric = record.run, record.run["metric"]
    found = {"key": (record.key, str), "seed": (record.seed, int), "seconds": (run["seconds"], int | float)}
    found |= {"method": (run["method"], str), "device": (record.device, str), "file": (record.file_name, str)}
    found |= {"environment": (record.environment, Mapping), "statistics": (record.statistics, Mapping)}
    for name, scores in cast("Mapping[str, Any]", run["final"]).items():
        found[f"final {name}"] = (scores[metric], int | float)
        found[f"curve {name}"] = (sum(run["curves"][name]), int | float)
    for name, (value, kind) in found.items():
        if not isinstance(value, kind):
            raise TypeError(f"{name} is {type(value).__name__}")
    if key_of(from_dict(record.config)) != record.key:
        raise ValueError("its key is not that of its config, so it would stand for another run")
    if record.precision not in PRECISIONS:
        raise ValueError(f"precision '{record.precision}' is not known")
    if not run["final"] or len(record.train_loss["round"]) != len(record.train_loss["loss"]):
        raise ValueError("it has no scores, or not as many losses as rounds")
    for row in record.probes:
        sum((row["round"], *row["probes"].values()))


def make_record(
    config: RunConfig,
    run: RunResult,
    rows: Iterable[RoundRow],
    client_domains: Sequence[str],
    environment: Mapping[str, Any],
    statistics: Mapping[str, Any] | None = None,
) -> Record:
    """What is kept of a run that was played to its end: of its rounds, those that were scored."""
    listed = list(rows)
    scored = [row for row in listed if "eval" in row]
    losses = {"round": [row["round"] for row in scored], "loss": [row["train_loss"] for row in scored]}
    probes = _probe_rows(config.eval.probes, listed, {row["round"] for row in scored})
    return Record(key_of(config), to_dict(config), run, losses, probes, client_domains, environment, statistics or {})


def _probe_rows(names: Sequence[str], rows: Sequence[RoundRow], scored: set[int]) -> list[dict[str, Any]]:
    """What probes saw by round, and the variance of it over a window as in FixBN's Figure 3(b)."""
    curves = {name: probe_curve(rows, name) for name in names}
    curves |= {f"{name} variance": probe_variance(rows, name, PROBE_WINDOW) for name in names}
    by_round: dict[int, dict[str, float]] = {}
    for name, (rounds, values) in curves.items():
        for round, value in zip(rounds, values, strict=True):
            if round in scored:
                by_round.setdefault(round, {})[name] = value
    return [{"round": round, "probes": by_round[round]} for round in sorted(by_round)]
