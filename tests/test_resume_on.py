"""Training on: a run gets more rounds than it was started with, equal to one that had them from the start, or not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import fednorm
import tiny
from command import TINY
from command import fednorm as command
from fednorm.errors import ConfigError
from fednorm.running.folder import RunFolder
from fednorm.running.longer import set_rounds
from test_api_results import stop_after

SETTINGS: dict[str, Any] = {
    "local_steps": 1,
    "batch_size": 4,
    "dtype": "float64",
    "eval.every": 2,
    "engine.device": "cpu",
    "engine.threads": 1,
}
GIVEN: dict[str, Any] = {"model": tiny.conv_net(), "federation": tiny.federation()}


def play(method: str, rounds: int, out: Path | None = None, **more: Any) -> fednorm.Result:
    return fednorm.run(method=method, rounds=rounds, out=out, **GIVEN, **{**SETTINGS, **more})


def on(folder: Path, rounds: int, **more: Any) -> fednorm.Result:
    return fednorm.resume(folder, rounds=rounds, **GIVEN, **more)


@pytest.mark.parametrize("method", ["fedavg", "fedbn+local-momentum", "fedadam", "fixbn(at=2)", "standalone"])
def test_more_rounds_give_the_bits_of_a_run_that_had_them(method: str, tmp_path: Path) -> None:
    play(method, 3, tmp_path / "a")
    longer = on(tmp_path / "a", 5).runs[0]
    whole = play(method, 5).runs[0]
    assert (longer["digest"], longer["rounds"], longer["rounds_done"]) == (whole["digest"], 5, 5)
    assert longer["notes"] == whole["notes"]
    assert json.loads((tmp_path / "a" / "config.json").read_text())["rounds"] == 5
    assert fednorm.resume(tmp_path / "a", **GIVEN).runs[0]["digest"] == whole["digest"]


def test_an_unfinished_run_may_have_more_while_its_schedule_has_not_begun_to_fall(tmp_path: Path) -> None:
    play("fedavg", 8, tmp_path / "a", schedule="step", on_row=stop_after(3))
    assert on(tmp_path / "a", 10).runs[0]["digest"] == play("fedavg", 10, schedule="step").runs[0]["digest"]


def refusal_of(folder: Path, reason: str) -> str:
    return (
        f"'{folder}' cannot be trained on as if it had been started with 6 rounds: {reason}; "
        "add --reschedule to let it follow the new number from here on"
    )


@pytest.mark.parametrize(
    ("method", "settings", "reason"),
    [
        ("fedavg", {"schedule": "cosine"}, "schedule 'cosine' spans the 4 rounds it was started with"),
        ("fedavg", {"schedule": "linear"}, "schedule 'linear' spans the 4 rounds it was started with"),
        ("fedavg", {"schedule": "step"}, "schedule 'step' spans the 4 rounds it was started with"),
        ("fixbn(at=0.5)", {}, "method 'fixbn(at=0.5)' changed its stage by the 4 rounds it was started with"),
        ("brn", {}, "BatchRenorm layers change over the 4 rounds the run was started with"),
        ("posthoc", {}, "method 'posthoc' ended the run with an exchange of its own"),
        (
            "fixbn(at=0.5)",
            {"schedule": "linear"},
            "schedule 'linear' spans the 4 rounds it was started with and "
            "method 'fixbn(at=0.5)' changed its stage by the 4 rounds it was started with",
        ),
    ],
)
def test_what_depends_on_the_length_is_refused_or_follows_the_new_one(
    method: str, settings: dict[str, Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = play(method, 4, tmp_path / "a", **settings).runs[0]
    with pytest.raises(ConfigError) as refusal:
        on(tmp_path / "a", 6)
    assert str(refusal.value) == refusal_of(tmp_path / "a", reason)
    assert fednorm.Result.load(tmp_path / "a").runs[0]["digest"] == before["digest"], "nothing was changed"
    capsys.readouterr()
    longer = on(tmp_path / "a", 6, reschedule=True).runs[0]
    note = f"{reason}: from round 5 on all follows the new number, 6"
    assert f"note: {note}\n" in capsys.readouterr().err
    assert (longer["rounds_done"], longer["notes"][-1]) == (6, note)


def test_fewer_rounds_are_refused(tmp_path: Path) -> None:
    play("fedavg", 3, tmp_path / "a")
    with pytest.raises(ConfigError) as refusal:
        on(tmp_path / "a", 2)
    assert str(refusal.value) == f"--rounds 2 is less than the 3 rounds of '{tmp_path}/a'; give more than that"
    assert on(tmp_path / "a", 3).runs[0]["rounds_done"] == 3


def test_a_kill_in_between_is_made_good_by_the_same_command(tmp_path: Path) -> None:
    play("fedavg", 2, tmp_path / "a")
    set_rounds(RunFolder(tmp_path / "a"), 4)  # as far as a killed command may have come
    with pytest.raises(ConfigError) as refusal:
        fednorm.resume(tmp_path / "a", **GIVEN)
    assert str(refusal.value) == (
        "the run was started with another config: rounds was 2, is 4; put it back, or start a new run"
    )
    assert on(tmp_path / "a", 4).runs[0]["digest"] == play("fedavg", 4).runs[0]["digest"]


def test_a_comparison_is_trained_on_as_a_whole(tmp_path: Path) -> None:
    asked = ("--quiet", "--json")
    short = (*TINY, "--rounds", "2", "--engine", "sequential")
    assert command("compare", "fedavg", "fixbn", *short, "--out", tmp_path / "c", "--quiet").code == 0
    shutil.copytree(tmp_path / "c", tmp_path / "half")
    refused = command("resume", tmp_path / "c", "--rounds", "6")
    assert (
        refused.err
        == "error: "
        + refusal_of(
            tmp_path / "c" / "fixbn-seed0", "method 'fixbn' changed its stage by the 2 rounds it was started with"
        )
        + "\n"
    )
    assert [run["rounds_done"] for run in command("resume", tmp_path / "c", *asked).json["runs"]] == [2, 2]
    longer = command("resume", tmp_path / "c", "--rounds", "6", "--reschedule", *asked)
    assert [run["rounds_done"] for run in longer.json["runs"]] == [6, 6]
    assert longer.err == (
        "note: method 'fixbn' changed its stage by the 2 rounds it was started with: "
        "from round 3 on all follows the new number, 6\n"
    )
    set_rounds(RunFolder(tmp_path / "half"), 6)
    assert command("resume", tmp_path / "half").err == (
        f"error: '{tmp_path}/half/fedavg-seed0' was started with another config: rounds was 2, is 6\n"
    )
    again = command("resume", tmp_path / "half", "--rounds", "6", "--reschedule", *asked)
    assert [run["digest"] for run in again.json["runs"]] == [run["digest"] for run in longer.json["runs"]]
