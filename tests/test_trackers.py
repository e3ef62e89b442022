"""Runs followed beside their folder by W&B and MLflow, without a network, with the real packages."""

from __future__ import annotations

import importlib.util
import json
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny
from command import TINY, fednorm
from fednorm.running.observers import Tracking, watching
from fednorm.running.progress import done_before
from fednorm.running.records import RoundRow, RunId

RUN = RunId("fixbn(at=0.5)+gn", 3)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def row(number: int) -> RoundRow:
    made: Any = {**tiny.row(number), "train_loss": 1 / number, "lr": 0.1, "eval": {"pooled": {"accuracy": 10.0}}}
    return {**made, "metric": tiny.ACCURACY}


def follow(name: str, folder: Path, numbers: tuple[int, ...], runs: tuple[RunId, ...] = (RUN,)) -> None:
    """Tell rounds of some runs, of the three that they have, to a tracker."""
    with watching(3, stream=None, tracking=Tracking([name], folder, {"train.lr": 0.1})) as tell:
        for number in numbers:
            for run in runs:
                tell(run, row(number))


def mlflow_history(folder: Path, run: RunId, name: str) -> list[tuple[int, float]]:
    from mlflow.tracking import MlflowClient

    id = json.loads((folder / "tracking.json").read_text())["mlflow"][run.file_name]
    client = MlflowClient(tracking_uri=(folder / "mlruns").as_uri())
    return [(each.step, each.value) for each in client.get_metric_history(id, name)]


def mlflow_run(folder: Path, run: RunId) -> Any:
    from mlflow.tracking import MlflowClient

    id = json.loads((folder / "tracking.json").read_text())["mlflow"][run.file_name]
    return MlflowClient(tracking_uri=(folder / "mlruns").as_uri()).get_run(id)


def test_mlflow_goes_on_with_the_same_run(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    follow("mlflow", tmp_path, (1, 2))
    assert mlflow_run(tmp_path, RUN).info.status == "KILLED"
    follow("mlflow", tmp_path, (2, 3))  # the second round was played again
    found = mlflow_run(tmp_path, RUN)
    assert (found.info.status, found.info.run_name) == ("FINISHED", "fixbn(at=0.5)+gn seed 3")
    assert found.data.params == {"train.lr": "0.1", "method": "fixbn(at=0.5)+gn", "seed": "3"}
    assert mlflow_history(tmp_path, RUN, "round/train_loss") == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert mlflow_history(tmp_path, RUN, "pooled/accuracy") == [(1, 10.0), (2, 10.0), (3, 10.0)]


def wandb_records(folder: Path, ends: int) -> list[Any]:
    """Records of offline files, once the process that writes them has written that many ends of runs."""
    limit = time.monotonic() + 600
    while True:
        records = list(_written(folder))
        if sum(each.HasField("exit") for each in records) == ends:
            return records
        assert time.monotonic() < limit, f"W&B did not write {ends} ends of runs"
        time.sleep(0.1)


def _written(folder: Path) -> Iterator[Any]:
    """What is in the files so far; a record is one frame as long as a file is small."""
    from wandb.proto import wandb_internal_pb2

    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        content, at = path.read_bytes(), 7
        while at + 7 <= len(content):
            _, length, _ = struct.unpack("<IHB", content[at : at + 7])
            if at + 7 + length > len(content):
                break
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content[at + 7 : at + 7 + length])
            yield record
            at += 7 + length


@pytest.mark.slow
def test_wandb_goes_on_with_the_same_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    other = RunId("fedavg", 3)
    follow("wandb", tmp_path, (1, 2), runs=(RUN, other))
    ids = json.loads((tmp_path / "tracking.json").read_text())["wandb"]
    assert set(ids) == {RUN.file_name, other.file_name}
    time.sleep(1.1)  # its files are named by the second
    follow("wandb", tmp_path, (3,))
    records = wandb_records(tmp_path, ends=3)
    assert [each.run.run_id for each in records if each.HasField("run")].count(ids[RUN.file_name]) == 2
    assert sorted(each.exit.exit_code for each in records if each.HasField("exit")) == [0, 1, 1]
    told = [
        (each.history.step.num, float(item.value_json))
        for each in records
        if each.HasField("history")
        for item in each.history.item
        if list(item.nested_key) == ["round/train_loss"]
    ]
    assert sorted(told) == [(1, 1.0), (1, 1.0), (2, 0.5), (2, 0.5), (3, pytest.approx(1 / 3))]


@pytest.mark.parametrize("tracker", ["wandb", "mlflow"])
def test_a_run_is_followed_from_the_command_line(tracker: str, tmp_path: Path) -> None:
    pytest.importorskip(tracker)
    done = fednorm("run", *TINY, "--out", tmp_path / "run", "--quiet", "--track", tracker, "--track", "tensorboard")
    assert (done.code, done.err) == (0, "")
    assert {"tensorboard", "tracking.json"} < {path.name for path in (tmp_path / "run").iterdir()}
    if tracker == "mlflow":
        steps = [step for step, _ in mlflow_history(tmp_path / "run", RunId("fedavg", 0), "round/bytes_up")]
    else:
        steps = [each.history.step.num for each in wandb_records(tmp_path / "run", ends=1) if each.HasField("history")]
    assert steps == [1, 2, 3]


def test_a_tracker_that_fails_warns_once_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nosuch://server")
    done = fednorm("run", *TINY, "--out", tmp_path / "run", "--quiet", "--track", "mlflow")
    assert done.code == 0
    assert done.err.startswith("warning: MLflow failed (")
    assert done.err.endswith("; the run goes on without it\n")
    assert done.err.count("\n") == 1


def test_unknown_and_missing_trackers_are_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = fednorm("run", *TINY, "--out", tmp_path / "run", "--track", "comet")
    assert (done.code, done.err) == (2, "error: --track comet is not known; give tensorboard, wandb, mlflow\n")
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "wandb" else real(name))
    done = fednorm("run", *TINY, "--out", tmp_path / "run", "--track", "wandb")
    assert (done.code, done.err) == (2, 'error: --track wandb needs wandb: pip install "fednorm[wandb]"\n')
    assert list(tmp_path.iterdir()) == []


def test_a_run_on_a_clock_goes_on_after_a_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunId("fedbuff", 0)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({**row(2), "time": 1.5}) + "\n")
    with watching(4, stream=sys.stdout, runs=1, before=done_before({run: tmp_path}, rounds=4)):
        pass
    assert capsys.readouterr().out == "fedbuff seed 0 goes on after version 2/4\n"


def test_rounds_done_before_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third = (RunId("fedavg", seed) for seed in range(3))
    folders = {run: tmp_path / run.file_name for run in (first, second, third)}
    for run in (first, second):
        folders[run].mkdir()
        played = (1, 2, 3, 4) if run == first else (1, 2)
        rows = [json.dumps({**row(number), "seconds": 10.0}) for number in played]
        (folders[run] / "metrics.jsonl").write_text("\n".join([*rows, '{"round": 3, "sec']))  # torn by a kill
        (folders[run] / "result.json").write_text("{}")  # the second one was stopped early
    before = done_before(folders, rounds=4)
    assert (before.finished, before.seconds) == (1, {second: {1: 10.0, 2: 10.0}, third: {}})
    with watching(4, stream=sys.stdout, runs=3, before=before) as tell:
        for number in (2, 3, 4):  # the second round is played again
            tell(second, {**row(number), "seconds": 1.0})  # type: ignore[typeddict-item]
        tell(third, {**row(4), "seconds": 2.0})  # type: ignore[typeddict-item]
    assert capsys.readouterr().out.splitlines() == [
        "[1/3] done before",
        "fedavg seed 1 goes on after round 2/4",
        "[2/3] fedavg seed 1  accuracy 10.0  13 s",
        "[3/3] fedavg seed 2  accuracy 10.0  2 s",
    ]
