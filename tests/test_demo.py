"""The demo: its comparison, its sentence and its picture, on numbers made by hand and on a real but tiny run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from command import fednorm
from fednorm.errors import ConfigError
from fednorm.running.config import updated
from fednorm.running.pictures import curves
from fednorm.running.results import Result
from fednorm.views import demo
from fednorm.views.seen import what_was_seen


def made(method: str, pooled: float, sent: int, how: str = "global model", seed: int = 0) -> dict[str, Any]:
    """A run with given scores."""
    scores = {"pooled": {"accuracy": pooled, "how": how}, "own_client": {"accuracy": 50.0}}
    return {
        "method": method,
        "seed": seed,
        "metric": "accuracy",
        "final": scores,
        "curves": {"round": [1, 2], "pooled": [1.0, pooled], "own_client": [1.0, 50.0]},
        "bytes": {"per_round": sent},
        "seconds": 1.0,
        "best_validation": None,
    }


RUNS = (
    made("centralized", 84.0, 0),
    made("standalone", 99.0, 0, "mean over the clients' own models"),
    made("fedavg", 54.0, 10),
    made("fixbn", 73.5, 10),
    made("fedbn", 3.0, 10, "averaged local state"),
)


def test_the_sentence_is_about_global_models_in_one_column() -> None:
    assert what_was_seen(Result(RUNS)) == (
        "On the pooled test, among federated methods with one global model, fixbn came out best (73.5) and fedavg "
        "worst (54.0); centralized training reached 84.0, 10.5 points above fixbn and 30.0 points above fedavg."
    )


def test_a_picture_needs_its_extra_and_is_a_png(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = curves(Result(RUNS), tmp_path / "curves.png", "a title")
    assert path.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'a picture of the curves needs matplotlib: pip install "fednorm\[report\]"'):
        curves(Result(RUNS), tmp_path / "again.png")
    assert not (tmp_path / "again.png").exists()


def test_the_demo_is_what_the_readme_says() -> None:
    config = demo.demo_config()
    assert (config.rounds, config.train.local_steps, config.data.clients, config.data.partition) == (
        40,
        10,
        5,
        "shards",
    )
    assert demo.METHODS == ("centralized", "standalone", "fedavg", "fedavg+gn", "fixbn", "fedbn")
    assert len(demo.SEEDS) == 2


def test_the_demo_runs_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {"rounds": 2, "train.local_steps": 1, "data.train_limit": 200, "model": "mlp_bn(width=16)"}
    monkeypatch.setattr(demo, "demo_config", lambda real=demo.demo_config: updated(real(), tiny))
    monkeypatch.setattr(demo, "SEEDS", (0, 1))
    done = fednorm("demo", "--out", tmp_path / "demo", "--jobs", 1)
    assert done.code == 0, done.err
    assert done.out.startswith(demo.HEADLINE)
    assert "* pooled test is the mean over the clients' own models, each on the whole set" in done.out
    assert "† pooled test uses the mean of the clients' local state" in done.out
    assert "On the pooled test, among federated methods with one global model" in done.out
    assert f"curves: {tmp_path / 'demo' / 'curves.png'}" in done.out
    assert (tmp_path / "demo" / "curves.png").exists()
    assert "fednorm inspect resnet18 --method fedbn" in done.out


def test_an_interrupted_demo_gets_its_picture_and_its_sentence_on_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = {"rounds": 2, "train.local_steps": 1, "data.train_limit": 200, "model": "mlp_bn(width=16)"}
    monkeypatch.setattr(demo, "demo_config", lambda real=demo.demo_config: updated(real(), tiny))
    monkeypatch.setattr(demo, "METHODS", ("centralized", "fedavg", "fixbn"))
    monkeypatch.setattr(demo, "SEEDS", (0,))
    folder = tmp_path / "demo"
    whole = fednorm("demo", "--out", folder, "--jobs", 1)
    seen = next(line for line in whole.out.splitlines() if line.startswith("On the pooled test"))
    shutil.rmtree(folder / "fixbn-seed0")  # as if it had been stopped before its last run
    for left in ("result.json", "curves.png"):
        (folder / left).unlink()
    again = fednorm("resume", folder)
    assert again.code == 0, again.err
    first, second, *_ = again.out.splitlines()
    assert first == "[2/3] done before"
    assert second.startswith("[3/3] fixbn seed 0  accuracy ")
    assert seen in again.out
    assert f"curves: {folder / 'curves.png'}" in again.out
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_less_may_be_better() -> None:
    lower = [{**run, "metric": "accuracy", "higher_is_better": False, "percent": False} for run in RUNS]
    assert what_was_seen(Result(tuple(lower))) == (
        "On the pooled test, among federated methods with one global model, fedavg came out best (54) and fixbn "
        "worst (73.5); centralized training reached 84, 30 above fedavg and 10.5 above fixbn."
    )


def test_one_method_is_compared_with_nothing() -> None:
    assert what_was_seen(Result(RUNS[:3])) is None


def test_spread_of_seeds_is_shown() -> None:
    runs = [*RUNS, *(replace_seed(run) for run in RUNS)]
    assert "(73.5 ± 0.0)" in what_was_seen(Result(tuple(runs)))


def replace_seed(run: dict[str, Any]) -> dict[str, Any]:
    return {**run, "seed": 1}
