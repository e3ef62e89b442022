"""Results of runs, one JSON file each, found by what was run: studies that need the same run share it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypedDict, cast

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
class _Outcome:
    """One run with one seed, as its file holds it."""

    key: str
    config: Mapping[str, Any]
    run: Any
    """`method`, `seed`, and as `ran` the precision and the device"""

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


@dataclass(frozen=True)
class Record(_Outcome):
    """A run that came to its end."""

    run: RunResult
    train_loss: Mapping[str, list[float]]
    """`round` and `loss`: the mean training loss of the rounds that were scored; `weighted`: with clients weighted by
    how many examples they train on, where the rows of the run had it"""
    probes: Sequence[Mapping[str, Any]]
    """what probes saw, of rounds that were scored: `round`, and `probes` with a number for each, the mean over clients;
    `NAME variance` is that of a client's numbers over the last looks"""
    client_domains: Sequence[str]
    """name of each client's domain; empty where data have none"""
    environment: Mapping[str, Any]
    """versions, commit, hardware, command"""
    statistics: Mapping[str, Any] = field(default_factory=dict)
    """running statistics of some clients, where a figure shows them"""


class DivergedRun(TypedDict):
    """What is known of a run that diverged."""

    method: str
    seed: int
    diverged_in: int
    """the round, or on a clock the version, that it did not reach"""
    why: str
    """what was said then"""
    ran: Mapping[str, str]
    """`precision`, `device`, `device_name`"""


@dataclass(frozen=True)
class Diverged(_Outcome):
    """A run that diverged: played once like any other, and there is no score of it."""

    run: DivergedRun
    environment: Mapping[str, Any]
    """versions, commit, hardware, command"""


Outcome = Record | Diverged
"""What became of one run with one seed."""


class Library:
    """A folder of records."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._found = dict[str, list[Outcome]]()
        """what was read of each key"""
        self._read = set[str]()
        """names of the files that were"""
        self._looked = False

    def outcomes(self, config: RunConfig) -> list[Outcome]:
        """What became of a run whenever it was played, seed by seed, the most exact first."""
        found = self._all().get(key_of(config), [])
        return sorted(found, key=lambda outcome: (outcome.seed, PRECISIONS.index(outcome.precision)))

    def records(self, config: RunConfig) -> list[Record]:
        """The outcomes of a run that have scores."""
        return [outcome for outcome in self.outcomes(config) if isinstance(outcome, Record)]

    def has(self, config: RunConfig, seed: int, precision: str | None = None) -> bool:
        """Whether a run was played, in one precision, or in the one that is shown where none is asked for."""
        return any(outcome.seed == seed for outcome in in_one_precision(self.outcomes(config), precision))

    def save(self, outcome: Outcome) -> Path:
        """Write an outcome whole or not at all, in the place of any other of the same run, seed and precision."""
        known = self._all().setdefault(outcome.key, [])
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / outcome.file_name
        write_json(path, {"version": VERSION, **as_written(vars(outcome))}, indent=1)
        self._read.add(path.name)
        known[:] = [*(each for each in known if each.file_name != outcome.file_name), outcome]
        return path

    def look_again(self) -> None:
        """Read what others have put there since."""
        if self.folder.exists() and not self.folder.is_dir():
            raise CheckpointError(f"'{self.folder}' is no folder, so it holds no results; give the folder they are in")
        for path in sorted(self.folder.glob("*.json")):
            if path.name not in self._read:
                outcome = _read_outcome(path)
                self._found.setdefault(outcome.key, []).append(outcome)
                self._read.add(path.name)
        self._looked = True

    def _all(self) -> dict[str, list[Outcome]]:
        if not self._looked:
            self.look_again()
        return self._found


def in_one_precision(outcomes: Sequence[Outcome], precision: str | None = None) -> tuple[Outcome, ...]:
    """Those of one precision, which is what a mean is over: the one with most seeds, of several the most exact."""
    of_each = [tuple(outcome for outcome in outcomes if outcome.precision == name) for name in PRECISIONS]
    return max(of_each, key=len) if precision is None else of_each[PRECISIONS.index(precision)]


def _read_outcome(path: Path) -> Outcome:
    """What a file holds; whatever else the file holds is refused by its name."""
    stored = read_json(path, _ANEW)
    try:
        if stored["version"] != VERSION:
            raise ValueError(f"version {stored['version']}, this fednorm reads {VERSION}")
        del stored["version"]
        outcome = (Record if "train_loss" in stored else Diverged)(**as_it_was(stored))
        _refuse_unusable(outcome)
    except (AttributeError, ConfigError, LookupError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise CheckpointError(f"'{path}' is no result of a study, or is damaged ({why}); {_ANEW}") from None
    return outcome


def _refuse_unusable(outcome: Outcome) -> None:
    """Look at what tables and pictures take from an outcome, before one of them fails at it.

    That there is nothing odd about a number is not looked at, since a run may have ended with any.
    """
    told = _told_of_record(outcome) if isinstance(outcome, Record) else _told_of_diverged(outcome)
    told |= {"key": (outcome.key, str), "seed": (outcome.seed, int), "environment": (outcome.environment, Mapping)}
    told |= {"method": (outcome.run["method"], str), "device": (outcome.device, str), "file": (outcome.file_name, str)}
    for name, (value, kind) in told.items():
        if not isinstance(value, kind):
            raise TypeError(f"{name} is {type(value).__name__}")
    if key_of(from_dict(outcome.config)) != outcome.key:
        raise ValueError("its key is not that of its config, so it would stand for another run")
    if outcome.precision not in PRECISIONS:
        raise ValueError(f"precision '{outcome.precision}' is not known")


def _told_of_diverged(outcome: Diverged) -> dict[str, tuple[Any, Any]]:
    """What is taken from a run that diverged, with the types that it must have."""
    return {"diverged_in": (outcome.run["diverged_in"], int), "why": (outcome.run["why"], str)}


def _told_of_record(record: Record) -> dict[str, tuple[Any, Any]]:
    """What is taken from a run that came to its end, with the types that it must have."""
    run, metric = record.run, record.run["metric"]
    found: dict[str, tuple[Any, Any]] = {"seconds": (run["seconds"], int | float)}
    found["statistics"] = (record.statistics, Mapping)
    for name, scores in cast("Mapping[str, Any]", run["final"]).items():
        found[f"final {name}"] = (scores[metric], int | float)
        found[f"curve {name}"] = (sum(run["curves"][name]), int | float)
    losses = record.train_loss
    if not run["final"] or any(len(losses[name]) != len(losses["round"]) for name in ("loss", *losses)):
        raise ValueError("it has no scores, or not as many losses as rounds")
    for row in record.probes:
        sum((row["round"], *row["probes"].values()))
    return found


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
    weighted = [row["train_loss_weighted"] for row in scored if "train_loss_weighted" in row]
    if len(weighted) == len(scored):
        losses["weighted"] = weighted
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
