"""The same command and seed give the same result: twice, with any --jobs, with every engine that `auto` may take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fednorm as package
import tiny
from command import fednorm
from fednorm.engines import choose
from fednorm.engines.stack.stacked import StackTrainer
from fednorm.errors import ConfigError
from fednorm.running.api import Playable, play
from fednorm.running.run import Run
from fednorm.running.store import Store

TINY = ("--rounds", "3", "--local-steps", "1", "--model", "mlp_bn(width=16)", "--set", "data.train_limit=200")


def numbers(result: Any) -> Any:
    """A result without what a clock measured, what it ran on, and what is in its file alone."""
    if isinstance(result, dict):
        aside = {"seconds", "ran", "folder", "picture", "made_from", "sha256"}
        return {key: numbers(value) for key, value in result.items() if key not in aside}
    return [numbers(each) for each in result] if isinstance(result, list) else result


def command(*arguments: object, cwd: Path, threads: int = 2) -> dict[str, Any]:
    """What a command line in a process of its own says; with two threads,."""
    whole = [sys.executable, "-m", "fednorm", *map(str, arguments), "--json", "--quiet"]
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(whole, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_command_twice_gives_the_same_numbers(tmp_path: Path) -> None:
    """Once here on one thread, once in a process of its own on two, as on a machine with other cores."""
    first = fednorm("run", *TINY, "--out", tmp_path / "a", "--json", "--quiet").json
    second = command("run", *TINY, "--out", "b", cwd=tmp_path)
    assert numbers(first) == numbers(second)
    assert first["runs"][0]["digest"] == second["runs"][0]["digest"]
    stored = json.loads((tmp_path / "b" / "result.json").read_text())
    assert numbers(stored) == numbers(first)


@pytest.mark.slow
def test_jobs_change_nothing(tmp_path: Path) -> None:
    """Not with `auto`, and not with an engine that alone would use both threads."""
    asked = ("compare", "fedavg", "fedbn", *TINY, "--json", "--quiet")
    torch.set_num_threads(2)
    try:
        auto, one, two = (
            fednorm(*asked, "--engine", engine, "--jobs", jobs, "--out", tmp_path / f"{engine}{jobs}").json
            for engine, jobs in (("auto", 1), ("sequential", 1), ("sequential", 2))
        )
    finally:
        torch.set_num_threads(1)
    assert numbers(auto) == numbers(one) == numbers(two)
    assert {run["digest"] for run in one["runs"]} == {run["digest"] for run in two["runs"]}
    assert {run["ran"]["threads"] for result in (auto, one, two) for run in result["runs"]} == {1}


def test_what_auto_chooses_by_a_clock_does_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the clock says: the stack may be as fast as it likes, and workers or not."""
    monkeypatch.setattr(choose, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(choose, "STACK_STEPS", 1)
    monkeypatch.setattr("fednorm.engines.workers.usable_cores", lambda: 2)
    found: dict[tuple[str, int, int], str] = {}
    for times in ({"sequential": 1.0, "workers": 0.5, "stacked": 0.01}, {"sequential": 1.0, "workers": 2.0}):
        monkeypatch.setattr(choose, "_seconds_of_rounds", lambda *_, times=times: times)
        summary = play(Playable(tiny.plan(rounds=20), Store()))
        ran = summary["ran"]
        found[ran["engine"], ran["processes"], ran["threads"]] = summary["digest"]
    assert found.keys() == {("workers", 2, 1), ("sequential", 1, 1)}
    assert len(set(found.values())) == 1


# -- what ran --


def test_a_result_says_what_ran(tmp_path: Path) -> None:
    done = fednorm(
        "run", *TINY, "--engine", "sequential", "--set", "engine.threads=1", "--out", tmp_path / "a", "--json"
    )
    ran = done.json["runs"][0]["ran"]
    assert ran.pop("device_name")
    assert ran == {
        "engine": "sequential",
        "fell_back": None,
        "precision": "fp32",
        "threads": 1,
        "processes": 1,
        "device": "cpu",
    }
    assert json.loads((tmp_path / "a" / "result.json").read_text())["runs"] == done.json["runs"]


def test_a_stack_that_fell_back_says_so_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    summary = play(Playable(tiny.plan(model=tiny.Choosy(), engine__name="stacked"), Store()))
    assert summary["ran"]["engine"] == "sequential"
    why = summary["ran"]["fell_back"] or ""
    assert why.startswith(
        "stacked: the model cannot be mapped over clients (vmap: It looks like you're either (1) calling"
    )
    assert capsys.readouterr().err.startswith("stacked engine: the model cannot be mapped over clients (")
    alone = play(Playable(tiny.plan(model=tiny.Choosy(), engine__name="sequential"), Store()))
    assert alone["digest"] == summary["digest"]


def test_a_stack_in_bf16_does_not_fall_back() -> None:
    """The sequential engine would round otherwise than was asked for."""
    made = tiny.plan(model=tiny.Choosy())
    phase = made.phases[0]
    starts = phase.starts(made.initial(), [{}] * 3, made.device)
    jobs = [made.job(phase, client, start, 0, made.numbers(phase.id, 1)) for client, start in enumerate(starts)]
    with pytest.raises(ConfigError) as refusal:
        list(StackTrainer(made, made, "bf16").train(phase, jobs))
    assert str(refusal.value).startswith("stacked engine: the model cannot be mapped over clients (vmap: It looks")
    assert str(refusal.value).endswith("), and other ways of training have no bf16; give engine.precision=tf32 or fp32")


def test_a_run_that_went_on_elsewhere_says_what_played_it_before(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    first = tiny.play(tiny.plan(), store, rounds=2).ran()
    monkeypatch.setattr("fednorm.running.how_it_ran.device_name", lambda device: "another machine")
    for _ in range(2):  # going on at the same place adds nothing
        run = Run(tiny.plan(), store)
        next(run.rounds(), None)
        run.stop()
    assert run.ran() == {**first, "device_name": "another machine", "before": [first]}
    assert store.facts()["ran"] == run.ran()


# -- settings that would do nothing --

IGNORED = {
    "--set engine.precision=bf16": "engine.precision=bf16 does nothing on the device cpu; give fp32, or --device cuda",
    "--set engine.precision=tf32 --engine stacked": "engine.precision=tf32 does nothing on the device cpu; give fp32, "
    "or --device cuda",
    "--set engine.workers=2 --engine sequential": "engine.workers=2 does nothing with engine 'sequential'; "
    "leave it out, or give --engine workers",
    "--set engine.workers=3 --engine stacked": "engine.workers=3 does nothing with engine 'stacked'; "
    "leave it out, or give --engine workers",
}


@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["run", "dry-run"])
@pytest.mark.parametrize("line", IGNORED)
def test_settings_that_do_nothing_are_refused(line: str, dry: tuple[str, ...], tmp_path: Path) -> None:
    done = fednorm("run", *TINY, "--device", "cpu", *line.split(), *dry, "--out", tmp_path / "a")
    assert (done.code, done.out, done.err) == (2, "", f"error: {IGNORED[line]}\n")
    assert not (tmp_path / "a").exists()


def test_settings_that_do_nothing_on_a_gpu_are_refused() -> None:
    from fednorm.engines.ignored import refuse_ignored, refuse_nothing_to_narrow

    gpu = torch.device("cuda", 0)
    told = []
    for changes, dtype in (
        ({"engine__name": "sequential", "engine__precision": "bf16"}, "float32"),
        ({"engine__precision": "tf32"}, "float64"),
        ({"engine__name": "workers"}, "float32"),
    ):
        with pytest.raises(ConfigError) as refusal:
            refuse_ignored(tiny.config(**changes).engine, gpu, dtype)
        told.append(str(refusal.value))
    assert told == [
        "engine.precision=bf16 does nothing with engine 'sequential'; give tf32 or fp32, or --engine stacked",
        "engine.precision=tf32 does nothing with train.dtype=float64; give fp32, or train.dtype=float32",
        "engine 'workers' trains on the CPU, but the device is cuda:0; give --device cpu, or --engine stacked",
    ]
    refuse_ignored(tiny.config(engine__name="sequential", engine__precision="tf32").engine, gpu, "float32")
    bf16 = tiny.config(engine__precision="bf16").engine
    refuse_nothing_to_narrow(bf16, tiny.conv_net(), "model 'a'")
    refuse_nothing_to_narrow(bf16, nn.Linear(64, 64), "model 'a'")
    with pytest.raises(ConfigError) as refusal:
        refuse_nothing_to_narrow(bf16, nn.Linear(2, 2), "model 'b'")
    assert str(refusal.value) == (
        "engine.precision=bf16 finds no plain convolution or large linear layer in model 'b' to act on; "
        "give tf32 or fp32"
    )


def test_the_package_names_its_errors() -> None:
    assert issubclass(package.UserCodeError, ConfigError)
