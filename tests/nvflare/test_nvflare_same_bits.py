"""The same run on NVFlare's simulator and in the sequential engine: global and local tensors have the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulated import tiny

from fednorm import Result
from fednorm.core.state import digest
from fednorm.engines.machine import threads
from fednorm.nvflare.same import compare_with_sequential
from fednorm.nvflare.simulate import rows_in, simulate
from fednorm.running.given import Objects
from fednorm.running.run import Run
from fednorm.running.store import Store

pytestmark = pytest.mark.nvflare

METHODS = {"fedavg": 0, "fedbn": 10, "silobn": 6, "fixbn": 0, "fedwon": 0, "fedbs(eps=100.0,rounds=1)": 0}
"""with how many entries of the model stay with a site"""
STAGES = {"fixbn": [0, 1, 1], "fedbs(eps=100.0,rounds=1)": [0, 1, 1]}


@pytest.mark.parametrize("method", METHODS)
def test_a_method_ends_with_the_bits_of_the_sequential_engine(method: str, tmp_path: Path) -> None:
    config = tiny(method=method)
    result = simulate(config, tmp_path / "run")
    compared = compare_with_sequential(config, tmp_path / "run", ["site-1", "site-2"])
    assert [each.holder for each in compared] == ["server", "server's memory", "site-1", "site-2"]
    assert [each.entry for each in compared if not each.is_same] == []

    with threads(1):
        run = Run(Objects().plan(config), Store())
        rows = list(run.rounds())
    assert result.runs[0]["digest"] == digest(run.server.tree)
    assert len(run.store.get(0).tree) == METHODS[method]
    there = rows_in(tmp_path / "run" / "metrics.jsonl")
    assert [row["stage"] for row in there] == [row["stage"] for row in rows] == STAGES.get(method, [0, 0, 0])
    for name in ("round", "clients", "exchanges", "bytes_up", "bytes_down", "lr", "train_loss", "train_loss_weighted"):
        assert [row[name] for row in there] == [row[name] for row in rows], name
    scores = {name: each for name, each in rows[-1]["eval"].items() if name == "own_client" or not METHODS[method]}
    assert {name: each["accuracy"] for name, each in there[-1]["eval"].items()} == {
        name: each["accuracy"] for name, each in scores.items()
    }

    again = Result.load(tmp_path / "run")
    assert again.table() == result.table()
    assert again.runs[0]["client_names"] == ["site-1", "site-2"]
    own = again.model(client=1).state_dict()
    assert digest({key: own[key] for key in run.store.get(1).tree}) == digest(run.store.get(1).tree)
