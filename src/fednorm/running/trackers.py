"""Where rounds are followed beside the folder: TensorBoard, Weights & Biases, MLflow. All are told the same numbers.

A run that is resumed goes on where it was followed: its ids are in the folder's tracking.json.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from fednorm.errors import ConfigError, first_line, require, visible
from fednorm.files import read_json, refuse_links, write_json
from fednorm.running.records import RoundRow, RunId

PROJECT = "fednorm"
"""The project of W&B and the experiment of MLflow, unless WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME say otherwise."""


@dataclass(frozen=True)
class Followed:
    """What a tracker is told of a run before its first round."""

    run: RunId
    first: int
    """number of the first round that is told"""
    folder: Path
    config: Mapping[str, Any]
    """all fields of the config by dotted name"""


class Log(Protocol):
    """One run with one tracker."""

    def log(self, number: int, values: Mapping[str, float]) -> None: ...

    def end(self, finished: bool) -> None: ...


def scalars(row: RoundRow) -> dict[str, float]:
    """The numbers of a round, as all trackers are told them.

    >>> scalars({"train_loss": 0.5, "lr": 0.1, "bytes_up": 8, "bytes_down": 8, "eval": {"pooled": {"accuracy": 50.0}}})
    {'round/train_loss': 0.5, 'round/lr': 0.1, 'round/bytes_up': 8, 'round/bytes_down': 8, 'pooled/accuracy': 50.0}
    """
    values = cast("Mapping[str, Any]", row)
    found = {f"round/{name}": values[name] for name in ("train_loss", "lr", "bytes_up", "bytes_down")}
    for protocol, scores in values.get("eval", {}).items():
        found |= {f"{protocol}/{name}": value for name, value in scores.items() if isinstance(value, int | float)}
    return found


class TensorBoardLog:
    """Events in the folder's `tensorboard`, one folder a run."""

    def __init__(self, about: Followed) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run writes the rounds after its last checkpoint again; the events of the first try give way.
        path = about.folder / "tensorboard" / about.run.file_name
        self.writer = SummaryWriter(str(path), purge_step=about.first)

    def log(self, number: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, number)

    def end(self, finished: bool) -> None:
        self.writer.close()


class WandbLog:
    """A W&B run of the same id for good; offline where nobody is logged in, so that nothing waits for an answer."""

    def __init__(self, about: Followed) -> None:
        import wandb

        mode = None
        if "WANDB_MODE" not in os.environ and not wandb.login(prompt=False):
            mode = "offline"
            print(f"note: not logged in to W&B; send it later with: wandb sync {about.folder}/wandb/*", file=sys.stderr)
        id = remembered(about, "wandb", lambda: secrets.token_hex(8))
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            group=about.folder.name,
            name=str(about.run),
            id=id,
            resume="allow",
            reinit="create_new",  # the runs of a comparison are followed at the same time
            dir=str(about.folder),
            mode=mode,
            config=dict(about.config),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, number: int, values: Mapping[str, float]) -> None:
        if number >= self.run.step:  # rounds after the last checkpoint are told again, and are the same
            self.run.log(dict(values), step=number)

    def end(self, finished: bool) -> None:
        self.run.finish(exit_code=0 if finished else 1)


class MlflowLog:
    """An MLflow run; in the folder's `mlruns`, unless MLFLOW_TRACKING_URI names a server."""

    def __init__(self, about: Followed) -> None:
        home = os.environ.get("MLFLOW_TRACKING_URI")
        if not home:
            home = (about.folder / "mlruns").resolve().as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # asked for files, it wants to be asked twice
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self.client = MlflowClient(tracking_uri=home)
        self.last = 0
        known = remembered(about, "mlflow")
        self.id = known or remembered(about, "mlflow", lambda: self._begin(about.run))
        if known:
            self.client.update_run(self.id, status="RUNNING")
            self.last = max((each.step for each in self.client.get_metric_history(self.id, "round/lr")), default=0)
        else:
            parameters = [Param(name, str(value)) for name, value in about.config.items()]
            self.client.log_batch(self.id, params=parameters)

    def _begin(self, run: RunId) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self.client.get_experiment_by_name(name)
        home = experiment.experiment_id if experiment else self.client.create_experiment(name)
        return self.client.create_run(home, run_name=str(run)).info.run_id

    def log(self, number: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        if number > self.last:  # rounds after the last checkpoint are told again, and are the same
            now = int(1000 * time.time())
            metrics = [Metric(name, float(value), now, number) for name, value in values.items()]
            self.client.log_batch(self.id, metrics=metrics)

    def end(self, finished: bool) -> None:
        self.client.set_terminated(self.id, "FINISHED" if finished else "KILLED")


@dataclass(frozen=True)
class TrackerKind:
    """A tracker by name: what begins with a run, the package it needs and the extra that brings it."""

    begin: Callable[[Followed], Log]
    title: str
    module: str
    extra: str


TRACKERS = {
    "tensorboard": TrackerKind(TensorBoardLog, "TensorBoard", "tensorboard", "track"),
    "wandb": TrackerKind(WandbLog, "W&B", "wandb", "wandb"),
    "mlflow": TrackerKind(MlflowLog, "MLflow", "mlflow", "mlflow"),
}


def check_tracker(name: str, flag: str) -> None:
    """Refuse a tracker that is not known or not installed, before any work."""
    if name not in TRACKERS:
        raise ConfigError(f"--track {name} is not known; give {', '.join(TRACKERS)}")
    require(TRACKERS[name].module, TRACKERS[name].extra, flag)


def remembered(about: Followed, tracker: str, make: Callable[[], str] | None = None) -> str:
    """The id of a run with a tracker, as tracking.json has it; else a new one, or nothing."""
    path = about.folder / "tracking.json"
    ids = read_json(path) if path.exists() else {}
    found = ids.get(tracker, {}).get(about.run.file_name, "")
    if not found and make:
        found = make()
        ids.setdefault(tracker, {})[about.run.file_name] = found
        write_json(path, ids)
    return found


class Tracker:
    """An observer that follows every run with one tracker; a run is begun with its first row."""

    def __init__(self, kind: TrackerKind, folder: Path, rounds: int, config: Mapping[str, Any]) -> None:
        self.name = kind.title
        self._kind, self._folder, self._rounds, self._config = kind, folder, rounds, config
        self._logs: dict[RunId, Log] = {}
        self._last: dict[RunId, int] = {}
        self._failed = False

    def __call__(self, run: RunId, row: RoundRow) -> None:
        self._failed = True  # until it is not: what failed once is not complained of again at the end
        if run not in self._logs:
            config = {**self._config, **run._asdict()}
            own = ("tensorboard", f"tensorboard/{run.file_name}", "wandb", "mlruns")
            refuse_links(*(self._folder / name for name in own))
            self._logs[run] = self._kind.begin(Followed(run, row["round"], self._folder, config))
        self._logs[run].log(row["round"], scalars(row))
        self._last[run] = row["round"]
        self._failed = False

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *problem: object) -> None:
        for run, log in self._logs.items():
            try:
                log.end(self._last.get(run) == self._rounds)
            except Exception as error:
                if not self._failed:
                    warn(self.name, error)


def warn(name: str, error: Exception) -> None:
    """One line for an observer that failed."""
    said = visible(first_line(error))
    print(f"warning: {name} failed ({said}); the run goes on without it", file=sys.stderr)
