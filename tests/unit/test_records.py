"""Records: what is written fits its types, what was written before still opens, what is newer is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NotRequired, Required, Union, get_args, get_origin, get_type_hints, is_typeddict

import pytest

import tiny
from fednorm.errors import CheckpointError
from fednorm.running import records
from fednorm.running.api import Playable, play
from fednorm.running.field_texts import field_texts
from fednorm.running.records import ResultFile, RoundRow, RunId, read_result, read_row
from fednorm.running.results import Result, summarise
from fednorm.running.store import Store

RECORDS = {name: cls for name, cls in vars(records).items() if is_typeddict(cls)}


def misfits(value: Any, hint: Any, where: str) -> list[str]:
    """Where a value differs from its type; keys of JSON objects are text."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (NotRequired, Required):
        return misfits(value, arguments[0], where)
    if is_typeddict(hint):
        hints = get_type_hints(hint, include_extras=True)
        needed = {
            name
            for name, each in hints.items()
            if get_origin(each) is Required or (hint.__total__ and get_origin(each) is not NotRequired)
        }
        wrong = [f"{where}: {name} is not a field" for name in value.keys() - hints.keys()]
        wrong += [f"{where}: {name} is missing" for name in needed - value.keys()]
        known = value.keys() & hints.keys()
        return wrong + [line for name in known for line in misfits(value[name], hints[name], f"{where}.{name}")]
    if origin is dict:
        return [line for key, each in value.items() for line in misfits(each, arguments[1], f"{where}.{key}")]
    if origin is list:
        return [line for each in value for line in misfits(each, arguments[0], f"{where}[]")]
    if origin is Union or str(origin) == "<class 'types.UnionType'>":
        found = [misfits(value, option, where) for option in arguments]
        return [] if [] in found else found[0]
    wanted = (int, float) if hint is float else hint
    return [] if isinstance(value, wanted) else [f"{where}: {value!r} is not {hint.__name__}"]


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def test_what_a_run_writes_fits_its_types() -> None:
    settings = {"data__val_fraction": 0.3, "eval__probes": ("grad-norm",), "clients_per_round": 2}
    store = Store()
    summary = play(Playable(tiny.plan("fedbn", **settings), store))
    rows = list(store.rows())
    assert [row["version"] for row in rows] == [records.ROW_VERSION] * 4
    assert [line for row in rows for line in misfits(row, RoundRow, "row")] == []
    assert {"cohort", "probes", "eval", "seconds"} <= {key for row in rows for key in row}
    assert misfits(through_json(Result((summary,)).to_json()), ResultFile, "result") == []


def test_the_check_finds_misfits() -> None:
    begun = {"version": 1, "round": 1, "stage": 0, "clients": 2, "exchanges": 0, "bytes_up": 0, "bytes_down": 0}
    row = {**begun, "lr": "high", "more": 1, "cohort": [0.5]}
    assert sorted(misfits(row, RoundRow, "row")) == [
        "row.cohort[]: 0.5 is not int",
        "row.lr: 'high' is not float",
        "row: more is not a field",
        "row: train_loss is missing",
    ]


@pytest.mark.parametrize("name", RECORDS)
def test_every_field_has_its_meaning(name: str) -> None:
    assert RECORDS[name].__doc__
    texts = field_texts(records)
    inherited = texts["Scores"].keys() if name == "BestRound" else set()
    assert texts[name].keys() | inherited == RECORDS[name].__annotations__.keys()


def old(round: int) -> dict[str, Any]:
    """A row as it was written before rows had a version, by a run that was stopped."""
    costs = {"exchanges": 1, "bytes_up": 10, "bytes_down": 20}
    scores = {"pooled": {"accuracy": 50.0 + round, "how": "global model"}}
    return {"round": round, "stage": 0, "clients": 2, **costs, "lr": 0.1, "train_loss": 1.0, "eval": scores}


def test_rows_without_version_and_seconds_still_open_and_are_summarised() -> None:
    rows = [read_row(old(1)), read_row({**old(2), "seconds": 0.5})]
    assert rows[0] == {**old(1), "version": 1}
    found = summarise(rows, method="fedavg", seed=0, rounds=2, metric="accuracy", digest="d")
    assert (found["seconds"], found["curves"]["pooled"], found["bytes"]["up"]) == (0.5, [51.0, 52.0], 20)
    assert found["peak"] == {"pooled": {"round": 2, "accuracy": 52.0}}
    result = Result((found,)).to_json()
    unversioned = {key: value for key, value in result.items() if key != "version"}
    assert read_result(unversioned) == read_result(result) == result


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_the_first_of_equally_good_rounds_is_the_best(higher_is_better: bool) -> None:
    sign = 1 if higher_is_better else -1

    def scored(round: int, value: float) -> RoundRow:
        scores = {"pooled": {"accuracy": sign * value}, "validation": {"accuracy": sign * value}}
        return read_row({**old(round), "eval": scores})

    rows = [scored(round, value) for round, value in enumerate([1.0, 7.0, 7.0, 3.0], 1)]
    found = summarise(
        rows, method="m", seed=0, rounds=4, metric="accuracy", higher_is_better=higher_is_better, digest="d"
    )
    assert found["best_validation"] == {"round": 2, **rows[1]["eval"]}
    assert found["peak"] == {"pooled": {"round": 2, "accuracy": sign * 7.0}}
    assert found["final"] == rows[3]["eval"]


def test_a_summary_of_no_rows_is_a_summary() -> None:
    found = summarise([], method="fedavg", seed=0, rounds=2, metric="accuracy", digest="d")
    assert (found["rounds_done"], found["final"], found["best_validation"], found["peak"]) == (0, {}, None, {})
    assert Result((found,)).table()[0]["how"] == ""


@pytest.mark.parametrize("version", [2, "1.5", None, 0])
def test_other_versions_are_refused_by_number(version: object) -> None:
    with pytest.raises(CheckpointError) as refusal:
        read_row({**old(1), "version": version})
    assert str(refusal.value) == (
        f"a row of metrics.jsonl has version {version}, this fednorm reads 1; use the fednorm that wrote it, "
        "or a newer one"
    )
    with pytest.raises(CheckpointError, match=r"^'x/result.json' has version .*, this fednorm reads 1; use the fednor"):
        read_result({"version": version, "runs": [{}]}, "'x/result.json'")


def test_what_is_no_record_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"^result.json is not a record of a run; give a folder that fednorm ma"):
        read_result([])  # type: ignore[arg-type]
    for runs in ({}, {"runs": []}, {"runs": 3}):
        with pytest.raises(CheckpointError, match=r"^result.json holds no run; delete it and resume"):
            read_result(runs)


def test_a_newer_row_in_the_state_names_its_file(tmp_path: Path) -> None:
    store = Store(tmp_path / "s")
    store.commit(1, {}, {}, [{"version": 7, "round": 1}])
    with pytest.raises(CheckpointError, match=r"round 1 in .*/s has version 7, this fednorm reads 1"):
        list(store.rows())
    store.close()


def test_a_run_has_one_name() -> None:
    run = RunId("fedprox(mu=0.01)+gn", 3)
    assert (str(run), run.file_name) == ("fedprox(mu=0.01)+gn seed 3", "fedprox_mu=0.01_gn-seed3")
    assert run == ("fedprox(mu=0.01)+gn", 3)
