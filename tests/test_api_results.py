"""The Python API with own objects: one signature for `run` and `compare`, stopping early, and what a result gives."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fednorm
import tiny
from fednorm.core.state import digest, model_state
from fednorm.errors import CheckpointError, ConfigError
from fednorm.methods import parse
from fednorm.running.records import RoundRow, RunId

SETTINGS: dict[str, Any] = {
    "rounds": 4,
    "local_steps": 1,
    "batch_size": 4,
    "dtype": "float64",
    "eval.every": 2,
    "engine.device": "cpu",
    "engine.threads": 1,
}
DATA = tiny.federation()
GIVEN: dict[str, Any] = {"model": tiny.conv_net(), "federation": DATA}


def play(method: Any = "fedbn", **more: Any) -> fednorm.Result:
    return fednorm.run(method=method, **GIVEN, **{**SETTINGS, **more})


def compare(methods: Any = ("fedavg", "fedbn"), **more: Any) -> fednorm.Result:
    return fednorm.compare(methods, **GIVEN, **{**SETTINGS, **more})


def same(one: nn.Module, other: nn.Module) -> bool:
    return digest(model_state(one)) == digest(model_state(other))


@pytest.fixture(scope="module")
def compared() -> fednorm.Result:
    """A comparison that was given no folder."""
    return compare(seeds=(0, 1))


def test_run_and_compare_share_a_signature(compared: fednorm.Result) -> None:
    assert compared.folder is None
    single = play(seed=1)
    again = next(run for run in compared.runs if (run["method"], run["seed"]) == ("fedbn", 1))
    assert single.runs[0]["digest"] == again["digest"]
    clients = [(DATA.x[rows], DATA.y[rows]) for rows in DATA.clients]
    tests = [(DATA.test_x[rows], DATA.test_y[rows]) for rows in DATA.own_test]
    settings = {**SETTINGS, "rounds": 1}
    by_hand = fednorm.compare(parse("fedavg"), model=GIVEN["model"], clients=clients, test=tests, use=(), **settings)
    assert by_hand.runs[0]["rounds_done"] == 1
    assert by_hand.runs[0]["digest"] == play("fedavg", rounds=1).runs[0]["digest"]


def test_the_files_of_a_comparison_without_a_folder_go_with_its_result() -> None:
    result = compare(["fedavg"], rounds=1)
    state = result.trained[0].state
    assert isinstance(state, Path)
    assert state.exists()
    del result
    assert not state.parent.parent.exists()


def test_a_result_gives_models_with_and_without_a_folder(compared: fednorm.Result, tmp_path: Path) -> None:
    stored = play(out=tmp_path / "a")
    in_memory = play()
    for client in (None, 0, 2):
        path = fednorm.export(tmp_path / "a", tmp_path / "m", client=client, **GIVEN)
        model = stored.model(client=client)
        assert not model.training
        assert isinstance(model[1], nn.BatchNorm2d)
        assert digest(model_state(model)) == digest(load_file(path))
        assert same(model, in_memory.model(client=client))
        assert same(model, compared.model("fedbn", client=client))
    assert not same(stored.model(client=0), stored.model(client=2))
    with torch.no_grad():
        right = (stored.model()(DATA.test_x).argmax(1) == DATA.test_y).double().mean()
    assert 100 * float(right) == pytest.approx(stored.final().mean)
    assert not same(compared.model("fedbn"), compared.model("fedbn", 1))


def test_a_model_after_surgery_is_the_network_that_was_trained() -> None:
    model = play("gn", rounds=1).model()
    assert isinstance(model[1], nn.GroupNorm)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, "there are 2 methods; name one: fedavg, fedbn"),
        ({"method": "fedvg"}, "method of this result 'fedvg' is not known; did you mean 'fedavg'?"),
        ({"method": "fedbn", "seed": 7}, "seed of this result '7' is not known; known: 0, 1."),
        ({"method": "fedbn", "client": 3}, "client 3 does not exist; the run has clients 0 to 2"),
        (
            {"method": "fedbn", "which": "best"},
            "no best model was kept; run with --keep best and --val-fraction, and wait for a round that is scored",
        ),
    ],
)
def test_models_that_are_not_there_are_named(asked: dict[str, Any], said: str, compared: fednorm.Result) -> None:
    with pytest.raises(ConfigError) as refusal:
        compared.model(**asked)
    assert str(refusal.value) == said


def test_tables_and_files_hold_the_same_numbers(compared: fednorm.Result, tmp_path: Path) -> None:
    rows = compared.rows()
    assert rows[0] == {
        "method": "fedavg",
        "seed": 0,
        "round": 2,
        "protocol": "pooled",
        "accuracy": compared.runs[0]["curves"]["pooled"][0],
    }
    assert len(rows) == 4 * 2 * 2
    with compared.to_csv(tmp_path / "rows.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [{**row, "accuracy": str(row["accuracy"])} for row in rows] == [
        {**row, "seed": int(row["seed"]), "round": int(row["round"])} for row in read
    ]
    clients = compared.per_client()
    assert [(each["method"], each["seed"], each["client"]) for each in clients][:4] == [
        ("fedavg", 0, 0),
        ("fedavg", 0, 1),
        ("fedavg", 0, 2),
        ("fedbn", 0, 0),
    ]
    assert clients[1]["accuracy"] == compared.runs[0]["final"]["own_client"]["per_client"]["1"]  # as JSON has it
    assert [each["class"] for each in compared.per_class()[:4]] == [0, 1, 2, 0]
    assert compared.picture(tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_frame_needs_pandas(compared: fednorm.Result) -> None:
    if importlib.util.find_spec("pandas"):
        assert list(compared.to_frame().columns) == ["method", "seed", "round", "protocol", "accuracy"]
        return
    with pytest.raises(ConfigError) as refusal:
        compared.to_frame()
    assert str(refusal.value) == 'a table as a DataFrame needs pandas: pip install "fednorm[report]"'


def test_a_result_is_read_from_its_folder(tmp_path: Path) -> None:
    result = compare(out=tmp_path / "c", rounds=1)
    read = fednorm.Result.load(tmp_path / "c", **GIVEN)
    assert read.rows() == result.rows()
    assert same(read.model("fedbn", client=1), result.model("fedbn", client=1))
    alone = fednorm.Result.load(tmp_path / "c" / "fedavg-seed0")
    assert alone.methods == ["fedavg"]
    with pytest.raises(ConfigError) as refusal:
        alone.model()
    assert str(refusal.value) == (
        f"'{tmp_path}/c/fedavg-seed0' was started from Python with its own model, federation; continue it there: "
        f"fednorm.resume('{tmp_path}/c/fedavg-seed0', model=..., clients=...)"
    )
    (tmp_path / "c" / "result.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no result yet; `fednorm resume .*` brings it to its end"):
        fednorm.Result.load(tmp_path / "c")


def stop_after(round: int, *methods: str) -> Any:
    def tell(run: RunId, row: RoundRow) -> None:
        if row["round"] == round and (not methods or run.method in methods):
            raise fednorm.Stop

    return tell


def test_stop_ends_a_run_that_can_be_resumed(tmp_path: Path) -> None:
    stopped = play(out=tmp_path / "a", on_row=stop_after(3))
    assert stopped.runs[0]["rounds_done"] == 3
    assert stopped.runs[0]["notes"][-1] == "stopped after round 3 of 4; resume it to go on"
    assert (tmp_path / "a" / "metrics.jsonl").read_text().count("\n") == 3
    assert isinstance(stopped.model(client=1), nn.Module)
    whole = play()
    resumed = fednorm.resume(tmp_path / "a", **GIVEN)
    assert resumed.runs[0]["digest"] == whole.runs[0]["digest"]
    assert resumed.runs[0]["notes"] == whole.runs[0]["notes"]
    assert play(on_row=stop_after(4)).runs[0]["notes"] == whole.runs[0]["notes"], "it was over anyway"


def test_stop_ends_one_run_of_a_comparison(tmp_path: Path) -> None:
    stopped = compare(out=tmp_path / "c", on_row=stop_after(2, "fedavg"))
    assert [run["rounds_done"] for run in stopped.runs] == [2, 4]
    resumed = fednorm.resume(tmp_path / "c", **GIVEN)
    assert [run["rounds_done"] for run in resumed.runs] == [4, 4]
    assert resumed.runs[0]["digest"] == play("fedavg").runs[0]["digest"]


def test_a_resumed_comparison_tells_of_all_its_runs(tmp_path: Path) -> None:
    """Also of those that had ended before."""

    def broken(run: RunId, row: RoundRow) -> None:
        if run.method == "fedbn" and row["round"] == 2:
            raise KeyboardInterrupt

    whole = compare()
    with pytest.raises(KeyboardInterrupt):
        compare(out=tmp_path / "c", on_row=broken, **{"engine.name": "sequential"})
    assert (tmp_path / "c" / "fedavg-seed0" / "result.json").exists()
    resumed = fednorm.resume(tmp_path / "c", **GIVEN)
    assert [run["digest"] for run in resumed.runs] == [run["digest"] for run in whole.runs]
    read = fednorm.Result.load(tmp_path / "c", **GIVEN)
    assert [(run["method"], run["rounds_done"]) for run in read.runs] == [("fedavg", 4), ("fedbn", 4)]


@pytest.mark.slow
def test_objects_go_to_processes_or_are_refused(tmp_path: Path) -> None:
    result = compare(jobs=2, on_row=stop_after(1, "fedavg"), **{"rounds": 300, "eval.every": 300})
    assert [run["rounds_done"] == 300 for run in result.runs] == [False, True]

    class Hidden(nn.Linear): ...

    given = {**GIVEN, "model": nn.Sequential(nn.Flatten(), Hidden(36, 3).double())}
    with pytest.raises(ConfigError) as refusal:
        fednorm.compare(["fedavg", "fedbn"], **given, **SETTINGS, allow_noop=True, jobs=2, out=tmp_path / "c")
    assert str(refusal.value).startswith("the given model, federation cannot be sent to another process (")
    assert str(refusal.value).endswith("; define it at the top of a module, or use jobs=1")


def test_what_was_given_must_be_given_again(tmp_path: Path) -> None:
    play(parse("fedavg"), out=tmp_path / "a", rounds=1)
    with pytest.raises(ConfigError) as refusal:
        fednorm.resume(tmp_path / "a")
    assert str(refusal.value) == (
        f"'{tmp_path}/a' was started from Python with its own model, federation, method; continue it there: "
        f"fednorm.resume('{tmp_path}/a', model=..., clients=..., method=...)"
    )
    other = tiny.federation((8, 12, 10))
    with pytest.raises(ConfigError) as refusal:
        fednorm.resume(tmp_path / "a", model=GIVEN["model"], federation=other, method=parse("fedavg"))
    assert str(refusal.value) == (
        f"'{tmp_path}/a' was started with other data: training inputs, training labels, clients differ; "
        "give the data it was started with, or another folder"
    )
    assert fednorm.resume(tmp_path / "a", method=parse("fedavg"), **GIVEN).runs[0]["rounds_done"] == 1
    fednorm.run(out=tmp_path / "b", model="mlp_bn(width=4)", rounds=1, local_steps=1, train_limit=100)
    with pytest.raises(ConfigError) as refusal:
        fednorm.export(tmp_path / "b", **GIVEN)
    assert str(refusal.value) == (
        f"'{tmp_path}/b' was started without objects from Python; continue it without model, clients"
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"clients": [(DATA.x, DATA.y)]},
            "clients were given without test data; pass test=(x, y), or a list with one per client",
        ),
        ({"test": (DATA.x, DATA.y)}, "test data was given without clients; pass clients=[...], one data set each"),
        (
            {"clients": [(DATA.x, DATA.y)], "test": (DATA.x, DATA.y), "federation": DATA},
            "clients and federation were both given; give one of them",
        ),
        ({"keep_every": 2}, "keep_every=2 writes into the run's folder; give out=DIR"),
    ],
)
def test_what_does_not_go_together_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        fednorm.run(**given)
    assert str(refusal.value) == said
