"""Scores over virtual time, staleness in a few characters, and expressions that hold a strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

import tiny
from fednorm.core.method import Method
from fednorm.errors import ConfigError
from fednorm.methods import parse
from fednorm.running.config import RunConfig, updated
from fednorm.running.on_clock import full_name, on_one_clock, settled
from fednorm.running.over_time import histogram, score_at, staleness_of, time_to, times_to
from fednorm.running.progress import Pace
from fednorm.running.records import RoundRow, RunId, RunResult
from fednorm.running.results import Result, summarise
from fednorm.views.seen import what_was_seen


def row(number: int, time: float, accuracy: float, *stale: int) -> RoundRow:
    scores = {"eval": {"pooled": {"accuracy": accuracy, "how": "global model"}}, "metric": tiny.ACCURACY}
    return cast(RoundRow, {**tiny.row(number), **scores, "time": time, "staleness": list(stale)})


def result(*rows: RoundRow, method: str = "fedbuff+fedavg", seed: int = 0) -> RunResult:
    return summarise(rows, method=method, seed=seed, rounds=len(rows), metric="accuracy", digest="")


QUICK = result(row(1, 0.5, 21.0, 0, 0), row(2, 1.5, 45.0, 1, 0), row(3, 2.0, 41.0, 2, 12))
SLOW = result(row(1, 4.0, 25.0, 0), row(2, 9.0, 30.0, 0), method="sync+fedavg")


def test_the_time_to_a_score_is_that_of_the_first_version_with_it() -> None:
    assert [time_to(QUICK, level) for level in (20, 21, 40, 45, 46)] == [0.5, 0.5, 1.5, 1.5, None]
    assert time_to(QUICK, 20, "own_client") is None
    assert times_to([QUICK, SLOW]) == {"10": [0.5, 4.0], "20": [0.5, 4.0], "30": [1.5, 9.0]}


def test_the_score_at_a_time_is_that_of_the_last_version_before() -> None:
    assert [score_at(QUICK, time) for time in (0.4, 0.5, 1.9, 99.0)] == [None, 21.0, 45.0, 41.0]


def test_what_was_seen_compares_at_the_same_time() -> None:
    late = result(row(1, 1.0, 25.0, 0), row(2, 9.0, 60.0, 0), method="sync+fedavg")
    quick, late, slow = (cast(Any, {**run, "bytes": {"per_round": 8}}) for run in (QUICK, late, SLOW))
    assert what_was_seen(Result((quick, late))) == (
        "On the pooled test at virtual time 2, among federated methods with one global model, fedbuff+fedavg came out "
        "best (41.0) and sync+fedavg worst (25.0)."
    )
    assert what_was_seen(Result((quick, slow))) == (
        "At virtual time 2, when the first method ended, sync+fedavg had no score yet: the scores above are of "
        "different times. Score more often (eval.every), or play more versions of it."
    )


def test_lower_may_be_better() -> None:
    falling = cast(Any, {**QUICK, "higher_is_better": False, "percent": False})
    assert time_to(falling, 41.0) == 0.5
    assert time_to(falling, 20.9) is None
    assert times_to([falling]) == {}


def test_tables_have_the_time_to_what_two_methods_reached(tmp_path: Path) -> None:
    found = Result((QUICK, SLOW))
    assert found.table()[0].get("time") == {"mean": 2.0, "std": 0.0, "n": 1}
    assert str(found).splitlines() == [
        "        method  pooled  time  time to 30 %  kB/round",
        "fedbuff+fedavg    41.0     2           1.5       0.0",
        "   sync+fedavg    30.0     9             9       0.0",
    ]
    reached = found.time_to(45)
    assert reached is not None
    assert reached.mean == 1.5
    assert [(line["round"], line["time"]) for line in found.rows()] == [
        (1, 0.5),
        (2, 1.5),
        (3, 2.0),
        (1, 4.0),
        (2, 9.0),
    ]
    written = found.to_csv(tmp_path / "rows.csv").read_text().splitlines()
    assert written[:2] == ["method,seed,round,time,protocol,accuracy", "fedbuff+fedavg,0,1,0.5,pooled,21.0"]


def test_staleness_is_counted() -> None:
    assert QUICK.get("staleness") == {"0": 3, "1": 1, "2": 1, "12": 1}
    assert staleness_of([]) == {}
    assert histogram({"0": 3, "1": 1, "2": 1, "12": 1}, width=13) == "0 █▃▃▁▁▁▁▁▁▁▁▁▃ 12"
    assert histogram({"0": 1, "100": 1}, width=4) == "0 █▁▁█ 100"


def test_a_line_of_progress_tells_the_time() -> None:
    pace = Pace(10)
    told = pace.tell(RunId("fedbuff+fedavg", 0), cast(RoundRow, {**row(2, 1.5, 45.0, 1, 0), "seconds": 0.5}))
    assert told == "time 1.5, 2.0 versions/s, 0:00:04 left, staleness 0 ██ 1"


def test_a_strategy_comes_first_in_a_name() -> None:
    assert full_name("gn + fedbuff( b=2 )") == "fedbuff(b=2)+gn"
    assert full_name("fedbuff") == "fedbuff+fedavg"
    config = updated(RunConfig(), {"method": "fedbn", "clock.strategy": "fedasync"})
    assert (settled(config).method, settled(config).clock.strategy) == ("fedasync+fedbn", None)
    assert settled(RunConfig()).method == "fedavg"
    with pytest.raises(ConfigError, match=r"^strategy 'fedbn' is not known"):
        settled(updated(RunConfig(), {"clock.strategy": "fedbn"}))


def test_what_is_compared_is_on_one_clock_or_on_none() -> None:
    config = RunConfig()
    assert on_one_clock(["fedavg", "fedbn"], config) == (config, ["fedavg", "fedbn"])
    assert on_one_clock(["fedavg", "fedbuff+fedbn"], config) == (config, ["sync+fedavg", "fedbuff+fedbn"])
    given = updated(config, {"clock.strategy": "fedasync"})
    assert on_one_clock(["fedavg", "fedbuff+fedbn"], given) == (config, ["fedasync+fedavg", "fedbuff+fedbn"])
    own: Method = parse("fedbn")
    assert on_one_clock([own, "fedavg"], given) == (given, ["fedbn", "fedasync+fedavg"])
