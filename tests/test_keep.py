"""What is kept beside the last model: the best by validation, and the models of every N-th round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

import fednorm
import tiny
from command import TINY
from command import fednorm as command
from fednorm.core.state import digest, model_state
from fednorm.errors import ConfigError
from test_cli_signals import committed, running, wait_for_rounds

ROUNDS = 8
SETTINGS: dict[str, Any] = {
    "local_steps": 1,
    "batch_size": 4,
    "lr": 0.3,
    "dtype": "float64",
    "val_fraction": 0.3,
    "eval.every": 1,
    "engine.device": "cpu",
    "engine.threads": 1,
}
GIVEN: dict[str, Any] = {"model": tiny.conv_net(), "federation": tiny.federation((12, 16, 12))}


def play(rounds: int = ROUNDS, **more: Any) -> fednorm.Result:
    return fednorm.run(rounds=rounds, **GIVEN, **{**SETTINGS, **more})


def files(folder: Path, pattern: str) -> dict[str, str]:
    return {path.name: digest(load_file(path)) for path in sorted(folder.glob(pattern))}


@pytest.mark.parametrize("method", ["fedbn+local-momentum", "fixbn(at=3)", "sbn", "centralized"])
def test_the_best_model_is_that_of_its_round(method: str, tmp_path: Path) -> None:
    kept = play(method=method, keep="best", out=tmp_path / "a")
    best = kept.runs[0]["best_validation"]
    assert best is not None
    assert best["round"] < ROUNDS, "or there would be nothing to see"
    short = play(best["round"], method=method)
    for client in (None, 1):
        found, expected = kept.model(client=client, which="best"), short.model(client=client)
        assert digest(model_state(found)) == digest(model_state(expected))
    assert files(tmp_path / "a", "best.*") == {"best.safetensors": digest(model_state(short.model()))}
    path = fednorm.export(tmp_path / "a", client=1, which="best", **GIVEN)
    assert path.name == "client-1-best.safetensors"
    assert digest(load_file(path)) == digest(model_state(short.model(client=1)))
    with safe_open(path, "pt") as file:
        assert file.metadata()["rounds"] == str(best["round"])
    assert kept.runs[0]["digest"] == play(method=method).runs[0]["digest"], "keeping changes nothing"
    in_memory = play(method=method, keep="best").model(client=1, which="best")
    assert digest(model_state(in_memory)) == digest(load_file(path))


def test_a_run_that_is_broken_off_keeps_the_same_best(tmp_path: Path) -> None:
    whole = play(method="fedbn", keep="best", out=tmp_path / "a")

    def fail(run: Any, row: Any) -> None:
        if row["round"] == 6:
            raise OSError("a power cut")

    with pytest.raises(OSError, match="a power cut"):
        play(method="fedbn", keep="best", out=tmp_path / "b", on_row=fail)
    resumed = fednorm.resume(tmp_path / "b", **GIVEN)
    assert resumed.runs[0]["best_validation"] == whole.runs[0]["best_validation"]
    assert files(tmp_path / "b", "best.*") == files(tmp_path / "a", "best.*")
    one, other = (each.model(client=2, which="best") for each in (whole, resumed))
    assert digest(model_state(one)) == digest(model_state(other))


def test_every_nth_model_is_written(tmp_path: Path) -> None:
    play(method="fedbn", keep_every=3, out=tmp_path / "a")
    expected = {f"round-{n}.safetensors": digest(model_state(play(n, method="fedbn").model())) for n in (3, 6)}
    assert files(tmp_path / "a", "round-*") == expected
    with safe_open(tmp_path / "a" / "round-3.safetensors", "pt") as file:
        about = file.metadata()
    assert {key: about[key] for key in about if not key.startswith("sha256")} == {
        "method": "fedbn",
        "model": "small_resnet",
        "round": "3",
    }


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"keep": "best", "val_fraction": 0.0},
            "keep=best chooses by validation, and data.val_fraction=0 sets nothing aside; give --val-fraction 0.1",
        ),
        ({"keep": "all"}, "keep='all' does not fit; give 'last' or 'best'"),
        ({"keep_every": -1}, "keep_every=-1 is out of range; give 0 or more"),
    ],
)
def test_what_cannot_be_kept_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        play(**given)
    assert str(refusal.value) == said


def test_the_command_line_exports_the_best(tmp_path: Path) -> None:
    keep = ("--keep", "best", "--val-fraction", "0.3", "--set", "eval.every=1", "--keep-every", "2")
    keep += ("--engine", "sequential", "--method", "fedbn")
    assert command("run", *TINY, *keep, "--out", tmp_path / "a", "--quiet").code == 0
    assert (tmp_path / "a" / "round-2.safetensors").exists()
    done = command("export", tmp_path / "a", "--which", "best", "--client", "2")
    assert done.out == f"{tmp_path}/a/client-2-best.safetensors\n"
    assert command("export", tmp_path / "a", "--which", "first").err == (
        "error: model 'first' is not known; known: best, last.\n"
    )


@pytest.mark.slow
def test_a_kill_leaves_the_same_best(tmp_path: Path) -> None:
    long = (
        *TINY,
        "--engine",
        "sequential",
        "--rounds",
        "40",
        "--method",
        "fedbn",
        "--keep",
        "best",
        "--keep-every",
        "10",
    )
    long += ("--val-fraction", "0.3", "--set", "eval.every=1")
    with running("run", *long, "--out", "run", cwd=tmp_path) as process:
        wait_for_rounds(process, tmp_path / "run", 5)
        process.kill()
        process.communicate()
    assert committed(tmp_path / "run") < 40
    assert command("resume", tmp_path / "run", "--quiet").code == 0
    assert command("run", *long, "--out", tmp_path / "whole", "--quiet").code == 0
    kept = files(tmp_path / "whole", "*.safetensors")
    assert set(kept) >= {"best.safetensors", "model.safetensors", "round-10.safetensors", "round-40.safetensors"}
    assert files(tmp_path / "run", "*.safetensors") == kept
    exports = [
        load_file(fednorm.export(tmp_path / name, tmp_path / f"{name}.st", client=3, which="best"))
        for name in ("run", "whole")
    ]
    assert digest(exports[0]) == digest(exports[1])
