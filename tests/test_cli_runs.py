"""Runs from the command line: folders, tables, resume, export, and what happens to damaged or busy folders."""

from __future__ import annotations

import json
import os
import re
import sqlite3
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import tiny
from command import TINY, fednorm
from fednorm.core.state import Kind, kinds
from fednorm.running.folder import RunFolder
from fednorm.running.observers import guarded, watching
from fednorm.running.records import RoundRow, RunId
from fednorm.running.sealed import sealed


@pytest.fixture(scope="module")
def fedbn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of FedBN."""
    folder = tmp_path_factory.mktemp("runs") / "fedbn"
    done = fednorm("run", "--method", "fedbn", *TINY, "--val-fraction", 0.2, "--out", folder)
    assert done.code == 0, done.err
    assert "round 3/3" in done.out
    assert "* pooled test uses the mean of the clients' local state" in done.out
    assert "best validation in round 3" in done.out
    return folder


def test_a_run_leaves_a_whole_folder(fedbn: Path) -> None:
    names = {path.name for path in fedbn.iterdir()}
    assert {"config.json", "env.json", "metrics.jsonl", "result.json", "model.safetensors", "state.sqlite"} <= names
    assert len((fedbn / "metrics.jsonl").read_text().splitlines()) == 3
    assert json.loads((fedbn / "result.json").read_text())["runs"][0]["rounds_done"] == 3


def test_resume_of_a_finished_run_tells_its_result(fedbn: Path) -> None:
    before = json.loads((fedbn / "result.json").read_text())["runs"]
    assert fednorm("resume", fedbn, "--json").json["runs"] == before


def test_an_existing_folder_is_never_overwritten(fedbn: Path) -> None:
    done = fednorm("run", *TINY, "--out", fedbn)
    assert done.code == 2
    assert done.err == f"error: '{fedbn}' holds a run already; choose another --out, or `fednorm resume {fedbn}`\n"


def test_export_joins_a_clients_own_state_with_the_shared(fedbn: Path, tmp_path: Path) -> None:
    assert fednorm("export", fedbn, "-o", tmp_path / "all.safetensors").code == 0
    assert fednorm("export", fedbn, "--client", 2, "-o", tmp_path / "two.safetensors").code == 0
    everyone, two = load_file(tmp_path / "all.safetensors"), load_file(tmp_path / "two.safetensors")
    final = load_file(fedbn / "model.safetensors")
    assert all(torch.equal(everyone[key], final[key]) for key in final)
    from fednorm.models import build

    model = build("mlp_bn", width=16, in_channels=1, image_size=28)
    model.load_state_dict(two)
    differs = {key for key in two if not torch.equal(two[key], everyone[key])}
    assert differs
    assert {kinds(model)[key] for key in differs} <= {Kind.AFFINE, Kind.STATISTIC, Kind.COUNTER}
    with safe_open(tmp_path / "two.safetensors", "pt") as file:
        facts = file.metadata()
    assert (facts["model"], facts["method"], facts["client"]) == ("mlp_bn(width=16)", "fedbn", "2")
    refused = fednorm("export", fedbn, "--client", 9)
    assert refused.err == "error: client 9 does not exist; the run has clients 0 to 4\n"


def test_an_exported_model_is_a_start_for_another_run(fedbn: Path, tmp_path: Path) -> None:
    start = fedbn / "model.safetensors"
    assert fednorm("run", *TINY, "--init", start, "--out", tmp_path / "a", "--quiet").code == 0
    other = fednorm("run", *TINY, "--model", "mlp_bn(width=8)", "--init", start, "--out", tmp_path / "b")
    assert other.code == 2
    assert f"error: '{start}' does not fit the model: " in other.err
    assert not (tmp_path / "b").exists()


def test_several_seeds_are_a_comparison(tmp_path: Path) -> None:
    done = fednorm("run", "--method", "gn", *TINY, "--seeds", "0,3", "--out", tmp_path / "both")
    assert done.code == 0, done.err
    assert "over seeds 0, 3" in done.out
    assert done.out.count("[2/2] gn seed 3") == 1
    assert fednorm("resume", tmp_path / "both", "--quiet").out.splitlines()[0].startswith("method")
    assert fednorm("export", tmp_path / "both").err == (
        f"error: '{tmp_path / 'both'}' is a comparison; export one of the runs in it\n"
    )


def test_compare_gives_one_table_and_the_same_numbers_as_single_runs(tmp_path: Path, fedbn: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[compare]\nmethods = ["fedavg", "fedbn"]\nseeds = [0]\n[data]\nval_fraction = 0.2\n')
    done = fednorm("compare", "--config", recipe, *TINY, "--out", tmp_path / "c", "--json")
    assert done.code == 0, done.err
    assert [line["method"] for line in done.json["table"]] == ["fedavg", "fedbn"]
    alone = json.loads((fedbn / "result.json").read_text())["runs"][0]
    assert done.json["runs"][1]["digest"] == alone["digest"]


def test_quiet_prints_the_table_alone(tmp_path: Path) -> None:
    done = fednorm("run", *TINY, "--out", tmp_path / "q", "--quiet")
    assert done.err == ""
    assert "rounds/s" not in done.out


def test_divergence_and_quorum_have_their_own_codes(tmp_path: Path) -> None:
    wild = (*TINY, "--lr", "1e30", "--local-steps", "3")
    diverged = fednorm("run", *wild, "--out", tmp_path / "a", "--quiet")
    assert diverged.code == 3
    assert diverged.err.startswith("error: diverged in round 1, client 0: ")
    assert diverged.err.endswith("lower train.lr, or set engine.quorum to go on without the client\n")
    short = fednorm("run", *wild, "--set", "engine.quorum=0.9", "--out", tmp_path / "b", "--quiet")
    assert short.code == 4
    assert "0 of 5 updates usable in round 1" in short.err


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_of_several_runs_the_one_that_diverged_is_named(jobs: str, tmp_path: Path) -> None:
    wild = (*TINY, "--lr", "1e30", "--local-steps", "3", "--jobs", jobs)
    done = fednorm("compare", "fedbn", "silobn", *wild, "--out", tmp_path / "c", "--quiet")
    assert done.code == 3
    assert re.match(r"error: (fedbn|silobn) seed 0: diverged in round 1, client 0: ", done.err.splitlines()[-1])


@pytest.mark.fault(row=20)
def test_a_busy_folder_is_left_alone(fedbn: Path) -> None:
    with RunFolder(fedbn).locked():
        done = fednorm("resume", fedbn)
    assert done.code == 6
    assert done.err == (f"error: '{fedbn}' is in use by process {os.getpid()}; wait for it or choose another folder\n")


@pytest.fixture
def copy(fedbn: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be damaged."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in fedbn.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.fault(row=22)
def test_a_changed_config_is_refused(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["train"]["lr"] = 0.5
    (copy / "config.json").write_text(json.dumps(config))
    done = fednorm("resume", copy)
    assert done.code == 2
    assert done.err == (
        f"error: '{copy}' was started with another config: train.lr was 0.05, is 0.5; put it back, or start a new run\n"
    )


def test_damaged_and_foreign_state_is_refused(copy: Path) -> None:
    database = sqlite3.connect(copy / "state.sqlite")
    database.execute("UPDATE server SET blob = zeroblob(100) WHERE name='model'")
    database.commit()
    database.close()
    damaged = fednorm("resume", copy)
    assert (damaged.code, "the stored state of model is damaged" in damaged.err) == (2, True), damaged.err
    for name in ("state.sqlite", "state.sqlite-wal", "state.sqlite-shm"):
        (copy / name).unlink(missing_ok=True)
    (copy / "state.sqlite").write_bytes(b"no database" * 100)
    foreign = fednorm("resume", copy)
    assert (foreign.code, "is not usable as the state of a run" in foreign.err) == (2, True), foreign.err
    (copy / "config.json").write_text("{}")
    assert fednorm("resume", copy).err.endswith("is not the config of a run; give a folder that fednorm made\n")


def test_code_named_in_a_folder_runs_only_if_allowed(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(sealed({**config, "model": "traitor:net"})))
    for verb in ("resume", "export"):
        done = fednorm(verb, copy)
        assert done.code == 2
        assert "names code to run, model 'traitor:net'; if you trust it, add --allow-code" in done.err


def test_tensorboard_events_are_written(tmp_path: Path) -> None:
    done = fednorm("run", *TINY, "--out", tmp_path / "t", "--quiet", "--tensorboard")
    assert (done.code, done.err) == (0, "")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "t" / "tensorboard" / "fedavg-seed0"))
    events.Reload()
    assert [event.step for event in events.Scalars("round/train_loss")] == [1, 2, 3]
    assert [event.step for event in events.Scalars("pooled/accuracy")] == [3]


def test_a_missing_extra_is_named_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "tensorboard" else real(name))
    done = fednorm("run", *TINY, "--out", tmp_path / "t", "--tensorboard")
    assert done.err == 'error: --tensorboard needs tensorboard: pip install "fednorm[track]"\n'
    assert not (tmp_path / "t").exists()


def test_a_failing_observer_warns_once(capsys: pytest.CaptureFixture[str]) -> None:
    asked = []

    def fail(run: RunId, row: RoundRow) -> None:
        asked.append(row)
        raise OSError("no space for events")

    tell = guarded(fail)
    for number in (1, 2):
        tell(RunId("fedavg", 0), tiny.row(number))
    assert len(asked) == 1
    assert capsys.readouterr().err == "warning: function failed (no space for events); the run goes on without it\n"


def test_a_terminal_gets_bars() -> None:
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    with watching(2, stream=screen, runs=2) as tell:
        for number in (1, 2):
            scored = {"eval": {"pooled": {"accuracy": 50.0 + number}}, "metric": tiny.ACCURACY}
            tell(RunId("fixbn", 0), tiny.row(number) | {"seconds": 0.5, **scored})
    assert "[1/2] fixbn seed 0  accuracy 52.0  1 s" in screen.getvalue()


def test_a_pretrained_start_says_what_the_swap_kept_and_lost(tmp_path: Path) -> None:
    assert fednorm("run", *TINY, "--out", tmp_path / "first").code == 0
    start = tmp_path / "first" / "model.safetensors"
    done = fednorm("run", *TINY, "--method", "gn", "--init", start, "--out", tmp_path / "second")
    assert "gn: 2 BatchNorm layers became GroupNorm(2): affine kept, running statistics dropped" in done.out
