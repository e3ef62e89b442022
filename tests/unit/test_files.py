"""JSON without NaN: null in the file, a word beside it, and the number again when it is read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny
from command import fednorm
from fednorm.cli.output import print_json
from fednorm.errors import CheckpointError
from fednorm.files import finite, infinite_again, json_text, read_json, write_json
from fednorm.running.folder import RunFolder
from fednorm.running.records import read_result, read_row
from fednorm.running.results import Result, summarise

INF, NAN = float("inf"), float("nan")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("a/~.0", max_size=3), inner, max_size=3),
    max_leaves=8,
)


def strict(text: str) -> Any:
    """Read JSON as others do, which know no NaN."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


@given(VALUES)
def test_any_value_comes_back(value: Any) -> None:
    clean, words = finite(value)
    again = infinite_again(strict(json_text(clean)), words)
    assert repr(again) == repr(value)


def test_files_hold_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(tmp_path / "a.json", {"loss": NAN, "rest": [1.0, (-INF,)]})
    print_json({"loss": INF})
    assert strict((tmp_path / "a.json").read_text()) == {"loss": None, "rest": [1.0, [None]]}
    assert strict(capsys.readouterr().out) == {"loss": None}


def test_a_row_says_what_was_not_finite(tmp_path: Path) -> None:
    scores = {"pooled": {"accuracy": 50.0, "loss": INF, "how": "global model"}}
    row = tiny.row(1) | {"train_loss": NAN, "eval": scores, "probes": {"train.0.0": {3: {"grad-norm": -INF}}}}
    with RunFolder(tmp_path).metrics_open([row]) as add:  # type: ignore[list-item]
        add(row)  # type: ignore[arg-type]
    first, second = map(strict, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first == second
    words = {"/train_loss": "nan", "/eval/pooled/loss": "inf", "/probes/train.0.0/3/grad-norm": "-inf"}
    assert first["not_finite"] == words
    assert (first["train_loss"], first["eval"]["pooled"]["loss"]) == (None, None)
    again = read_row(first)
    assert math.isnan(again["train_loss"])
    assert again["eval"]["pooled"]["loss"] == INF
    assert "not_finite" not in again


def test_a_result_says_what_was_not_finite() -> None:
    row = tiny.row(1) | {"eval": {"pooled": {"accuracy": INF, "loss": NAN, "how": "global model"}}}
    summary = summarise([row], method="fedavg", seed=0, rounds=1, metric="accuracy", digest="d")  # type: ignore[list-item]
    stored = strict(json_text(Result((summary,)).to_json()))
    assert stored["table"][0]["pooled"] == {"mean": None, "std": None, "n": 1}
    words = stored["runs"][0]["not_finite"]
    assert words["/final/pooled/accuracy"] == words["/curves/pooled/0"] == "inf"
    (run,) = read_result(stored)["runs"]
    assert run["final"]["pooled"]["accuracy"] == INF
    assert repr(Result((run,)).to_json()["runs"][0]["not_finite"]) == repr(words)


def test_infinite_settings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[train]\nlr = inf\n")
    done = fednorm("run", "--config", tmp_path / "a.toml")
    assert (done.code, done.err) == (2, "error: train.lr=inf is out of range; give 0 or more\n")


def test_a_folder_that_is_a_file_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"/file' is not the folder of a run: it has no config.json$"):
        read_json(tmp_path / "file" / "config.json")
    with pytest.raises(
        CheckpointError, match=r"config.json' cannot be read: Is a directory; give a folder that you ma"
    ):
        read_json(tmp_path / "config.json")
