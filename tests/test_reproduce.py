"""`fednorm reproduce`: runs are played, kept, found again, taken up again; the command's words."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from command import fednorm
from fednorm.errors import ConfigError, DivergedError
from fednorm.running.cells import Cell
from fednorm.running.config import RunConfig, updated
from fednorm.running.records import OnRow, RoundRow, RunId
from fednorm.running.stopping import Interrupted
from fednorm.studies.beside import ours_text
from fednorm.studies.client_statistics import Look
from fednorm.studies.estimate import seconds_of
from fednorm.studies.library import Library, key_of
from fednorm.studies.measured import measured
from fednorm.studies.playing import Place, play_runs, wanted_runs
from fednorm.studies.published import Experiment, PublishedCell
from fednorm.studies.queue import HOLD, missing_jobs, play_next, standing, with_data
from fednorm.studies.recipes import Score, StudyRecipe
from fednorm.studies.study import Study, all_studies

KEPT = str(Path(__file__).parents[1] / "studies" / "results")
RUN = {
    "rounds": 4,
    "model": "mlp_bn",
    "data": {"clients": 2, "train_limit": 80},
    "train": {"local_steps": 2},
    "eval": {"every": 2},
}


def study(*methods: str, seeds: tuple[int, ...] = (0, 1)) -> Study:
    cells = tuple(PublishedCell(method, {}, 50.0, None) for method in methods)
    experiment = Experiment("paper.t1", "table", "A paper: Table 1", "fashion_mnist", "", cells, methods, (), ())
    return Study(experiment, StudyRecipe(RUN, {name: name for name in methods}, {}, Score(), seeds=seeds))


@contextmanager
def unwatched(cells: Sequence[Cell]) -> Iterator[OnRow]:
    yield lambda run, row: None


def place(folder: Path) -> Place:
    return Place(Library(folder / "results"), folder / "work", device="cpu")


def digests(folder: Path) -> dict[str, str]:
    return {path.name: json.loads(path.read_text())["run"]["digest"] for path in (folder / "results").glob("*.json")}


def test_a_study_is_played_once_and_shared(tmp_path: Path) -> None:
    asked = study("fedavg", "fixbn")
    here = place(tmp_path)
    assert play_runs(wanted_runs(asked.cells(), [0]), here, unwatched)
    kept = digests(tmp_path)
    assert len(kept) == 2
    # Another study that needs one of the runs finds it, whoever played it.
    other = study("fedavg")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "results").glob("*.json")}
    assert play_runs(wanted_runs(other.cells(), [0]), place(tmp_path), unwatched)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "results").glob("*.json")} == times


def test_a_cell_that_is_deleted_is_made_again(tmp_path: Path) -> None:
    asked = study("fedavg", seeds=(0,))
    said: list[str] = []
    assert play_next([asked], place(tmp_path), 5.0, unwatched, said.append) == 1
    before = digests(tmp_path)
    (path,) = (tmp_path / "results").glob("*.json")
    path.unlink()
    (tmp_path / "work").rename(tmp_path / "elsewhere")  # a bare machine
    assert play_next([asked], place(tmp_path), 5.0, unwatched, said.append) == 1
    assert digests(tmp_path) == before
    assert play_next([asked], place(tmp_path), 5.0, unwatched, said.append) == 0
    assert said == ["paper.t1  fedavg  seeds 0"] * 2


def test_a_run_that_time_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    runs = wanted_runs(study("fixbn").cells(), [0])
    assert play_runs(runs, place(tmp_path / "whole"), unwatched)
    assert not play_runs(runs, place(tmp_path / "parts"), unwatched, deadline=time.monotonic())
    assert digests(tmp_path / "parts") == {}
    rows = next((tmp_path / "parts" / "work").glob("*/metrics.jsonl")).read_text().splitlines()
    assert len(rows) < RUN["rounds"]  # pyright: ignore[reportOperatorIssue]
    assert play_runs(runs, place(tmp_path / "parts"), unwatched)
    assert digests(tmp_path / "parts") == digests(tmp_path / "whole")


def test_a_run_on_a_clock_that_ended_is_in_the_library_alone(tmp_path: Path) -> None:
    runs = wanted_runs(study("fedbuff(b=1)+fedavg").cells(), [0])
    assert not play_runs(runs, place(tmp_path), unwatched, deadline=time.monotonic())
    assert list((tmp_path / "work").iterdir())
    assert play_runs(runs, place(tmp_path), unwatched)
    assert list((tmp_path / "work").iterdir()) == []
    kept = digests(tmp_path)
    assert len(kept) == 1
    assert play_runs(runs, place(tmp_path), unwatched)
    assert list((tmp_path / "work").iterdir()) == []
    assert play_runs(runs, place(tmp_path / "whole"), unwatched)
    assert digests(tmp_path / "whole") == kept


def test_a_record_names_what_made_it_and_no_folder(tmp_path: Path) -> None:
    assert play_runs(wanted_runs(study("fedavg").cells(), [0]), place(tmp_path), unwatched)
    (path,) = (tmp_path / "results").glob("*.json")
    kept = json.loads(path.read_text())
    assert str(tmp_path) not in path.read_text()
    assert kept["environment"]["command"].split()[0] == "fednorm"
    assert kept["environment"]["torch"]
    assert kept["run"]["curves"]["round"] == [2, 4]
    assert kept["train_loss"]["round"] == [2, 4]


def test_statistics_that_a_figure_shows_are_kept_where_clients_have_their_own(tmp_path: Path) -> None:
    asked, look = study("fedavg", "fedbn"), Look(layers=(1,), clients=(0, 1))
    looks = {key_of(cell.config): look for cell in asked.cells()}
    assert play_runs(wanted_runs(asked.cells(), [0]), place(tmp_path), unwatched, looks=looks)
    kept = {path.name: json.loads(path.read_text())["statistics"] for path in (tmp_path / "results").glob("*.json")}
    shared, own = (kept[name] for name in sorted(kept))
    assert shared == {}
    first, second = own["1"]["running_mean"]
    assert list(own) == ["1"]
    assert set(own["1"]) == {"running_mean", "running_var"}
    assert len(first) == len(second) > 1
    assert first != second


def test_a_study_without_its_data_leaves_nothing_behind(tmp_path: Path) -> None:
    places = ("--results", tmp_path / "results", "--work", tmp_path / "work", "--data-dir", tmp_path)
    done = fednorm("reproduce", "fixbn.tH", *places)
    assert done.code == 2
    assert "cifar10 was not found in" in done.err
    assert list(tmp_path.iterdir()) == []


def test_what_takes_too_long_is_not_begun_and_said_to_be(tmp_path: Path) -> None:
    said: list[str] = []
    asked = study("fedavg", "fixbn")
    assert play_next([asked], place(tmp_path), 0.01, unwatched, said.append) == 0
    longest = max(seconds_of(cell.config, 1, on_gpu=False) for cell in asked.cells())
    needed = f"paper.t1 (needs --minutes {int(longest // 60) + 1})"
    assert said == [f"some runs take longer than 0.01 minutes seed by seed, and --next passes them over: {needed}"]


def test_what_does_not_fit_a_usual_hold_is_listed(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    rows = fednorm("reproduce", "--list", "--json", "--results", tmp_path / "results").json
    needed = {row["id"]: row["needs_minutes"] for row in rows}
    for job in missing_jobs(all_studies(), lambda config, seed: False):
        alone = seconds_of(job.config, 1, on_gpu=True) / 60
        assert alone < HOLD or needed[job.study] > alone, job.label
    assert {id for id, minutes in needed.items() if minutes} == {"fixbn.grid.tiny", "fixbn.t2", "fixbn.t3"}
    text = fednorm("reproduce", "--list", "--results", tmp_path / "results").out
    assert f"fixbn.t2 (needs --minutes {needed['fixbn.t2']})" in text


def test_a_run_that_diverges_is_named_and_leaves_the_others_alone(tmp_path: Path) -> None:
    methods = {"fedavg": {"method": "fedavg", "set": {"train.lr": 1e30}}, "fixbn": "fixbn", "fedbn": "fedbn"}
    asked = replace(study("fedavg", "fixbn", "fedbn"), recipe=StudyRecipe(RUN, methods, {}, Score()))
    with pytest.raises(DivergedError, match=r"^fedavg seed 0: diverged in round 1, client "):
        play_runs(wanted_runs(asked.cells(), [0]), place(tmp_path), unwatched)
    kept = [json.loads(path.read_text()) for path in sorted((tmp_path / "results").glob("*.json"))]
    assert [each["run"]["method"] for each in kept] == ["fedavg", "fedbn", "fixbn"]
    assert {key: kept[0]["run"][key] for key in ("seed", "diverged_in")} == {"seed": 0, "diverged_in": 1}
    assert kept[0]["run"]["why"].startswith("fedavg seed 0: diverged in round 1, client ")
    assert kept[0]["run"]["ran"]["precision"] == "fp32"
    assert kept[0]["environment"]["command"].startswith("fednorm")
    assert kept[0]["environment"]["torch"]


def test_a_run_that_diverged_is_not_played_again(tmp_path: Path) -> None:
    methods = {"fedavg": {"method": "fedavg", "set": {"train.lr": 1e30}}, "fixbn": "fixbn"}
    asked = replace(study("fedavg", "fixbn", seeds=(0,)), recipe=StudyRecipe(RUN, methods, {}, Score(), seeds=(0,)))
    said: list[str] = []
    assert play_next([asked], place(tmp_path), 5.0, unwatched, said.append) == 2
    assert said[1].startswith("paper.t1  fedavg: diverged in round 1, client ")
    assert play_next([asked], place(tmp_path), 5.0, unwatched, said.append) == 0
    assert len(said) == 3
    assert standing(asked, Library(tmp_path / "results")).state == "done"
    (lost, _) = measured(asked.cells(), Library(tmp_path / "results"))
    assert (lost.ours, lost.difference, ours_text(lost)) == (None, None, "diverged in round 1")


def test_what_ended_before_a_signal_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def stopped_in_the_second(cells: Sequence[Cell]) -> Iterator[OnRow]:
        def tell(run: RunId, row: RoundRow) -> None:
            if run == cells[1].id:
                os.kill(os.getpid(), signal.SIGINT)

        yield tell

    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # one after the other
    with pytest.raises(Interrupted):
        play_runs(wanted_runs(study("fedavg", "fixbn").cells(), [0]), place(tmp_path), stopped_in_the_second)
    assert [name.split("-")[2] for name in digests(tmp_path)] == ["fedavg"]


def test_runs_whose_data_are_not_here_are_passed_over_where_others_are(tmp_path: Path) -> None:
    said: list[str] = []
    here = replace(place(tmp_path), data_dir=str(tmp_path))
    embedded, elsewhere = (updated(RunConfig(), {"data.name": name}) for name in ("fashion_mnist_small", "mnist"))
    assert with_data([(elsewhere, 0), (embedded, 0)], here, said.append) == [(embedded, 0)]
    assert said == ["mnist is not here: what needs it is passed over (`fednorm data info mnist` says how to get it)"]
    assert with_data([(elsewhere, 0)], here, said.append) == [(elsewhere, 0)]  # to be refused
    assert len(said) == 1


def test_seeds_that_do_not_fit_together_are_played_one_by_one(tmp_path: Path) -> None:
    asked, said = study("fedavg"), list[str]()
    (cell,) = asked.cells()
    alone, together = (seconds_of(cell.config, count, on_gpu=False) for count in (1, 2))
    assert play_next([asked], place(tmp_path), (alone + together) / 2 / 60, unwatched, said.append) == 2
    assert said == ["paper.t1  fedavg  seeds 0", "paper.t1  fedavg  seeds 1"]


def test_two_at_once_share_what_is_missing(tmp_path: Path) -> None:
    asked, said, elsewhere = study("fedavg", "fixbn", "fedbn", seeds=(0,)), list[str](), list[str]()
    played: list[int] = []

    @contextmanager
    def while_another_plays(cells: Sequence[Cell]) -> Iterator[OnRow]:
        if not played:  # it finds the first one taken, and leaves nothing else
            played.append(play_next([asked], place(tmp_path), 5.0, unwatched, elsewhere.append))
        yield lambda run, row: None

    assert play_next([asked], place(tmp_path), 5.0, while_another_plays, said.append) == 1
    assert said == ["paper.t1  fedavg  seeds 0"]
    assert played == [2]
    assert elsewhere == [
        "paper.t1  fedavg: another process is at it",
        "paper.t1  fixbn  seeds 0",
        "paper.t1  fedbn  seeds 0",
    ]
    assert sorted(name.split("-")[2] for name in digests(tmp_path)) == ["fedavg", "fedbn", "fixbn"]


def test_the_list_names_every_experiment(tmp_path: Path) -> None:
    done = fednorm("reproduce", "--list", "--json", "--results", str(tmp_path))
    rows = done.json
    assert len(rows) == 42
    assert rows[0]["id"] == "fixbn.t1"
    assert {key: rows[0][key] for key in ("state", "cells", "cells_done")} == {
        "state": "open",
        "cells": 4,
        "cells_done": 0,
    }
    data = {row["id"]: row["data"] for row in rows}
    assert (data["fixbn.t1"], data["fixbn.partitions"]) == ("cifar10", "cifar10, tiny_imagenet")


def test_a_precision_that_is_asked_for_is_shown_and_counted(tmp_path: Path) -> None:
    asked = ["--precision", "tf32", "--json", "--results", KEPT]
    (cell,) = fednorm("reproduce", "fixbn.norms", "--show", "--methods", "fixbn", *asked).json["cells"]
    assert [(run["seed"], run["precision"]) for run in cell["runs"]] == [(0, "tf32")]
    counted = {row["id"]: row["cells_done"] for row in fednorm("reproduce", "--list", *asked).json}
    assert counted["fixbn.norms"] == 0


def test_the_queue_speaks_json(tmp_path: Path) -> None:
    places = ("--results", tmp_path / "results", "--work", tmp_path / "work", "--data-dir", tmp_path)
    done = fednorm("reproduce", "--next", "--json", *places)
    assert done.json == {"played": 0, "results": str(tmp_path / "results")}
    assert "cifar10 is not here" in done.err


def test_results_that_cannot_be_kept_are_not_computed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    here = Place(Library(tmp_path / "file" / "results"), tmp_path / "work", device="cpu")
    with pytest.raises(ConfigError, match="file/results' cannot be written: Not a directory; choose another place"):
        play_runs(wanted_runs(study("fedavg").cells(), [0]), here, unwatched)
    assert not (tmp_path / "work").exists()


@pytest.mark.slow
def test_a_quick_study_prints_its_table_and_says_what_it_is(tmp_path: Path) -> None:
    arguments = ["reproduce", "fixbn.tH", "--quick", "--methods", "fixbn", "--work", str(tmp_path), "-q"]
    done = fednorm(*arguments)
    assert done.code == 0
    assert "76.6" not in done.out
    assert "paper  " not in done.out
    assert "quick run: a small budget on embedded data, not the paper's setting" in done.out
    again = fednorm(*arguments, "--json").json  # played already
    assert again["quick"] is True
    assert again["cells"][0]["difference"] is None
    assert again["cells"][0]["paper"] is None
    assert len(again["cells"][0]["runs"]) == 1


def test_some_settings_of_a_study_can_be_asked_for() -> None:
    settings = ["--where", "local_steps=100", "--where", "momentum=local", "--where", "momentum=global"]
    found = fednorm("reproduce", "fixbn.momentum", "--show", "--json", "--methods", "fixbn", *settings).json["cells"]
    told = [(cell["setting"]["local_steps"], cell["setting"]["momentum"]) for cell in found]
    assert sorted(set(told)) == [("100", "global"), ("100", "local")]
    assert {cell["method"] for cell in found} == {"fixbn"}
    reading = ["--methods", "fixbn", "--where", "variant=no_decay"]
    found = fednorm("reproduce", "fixbn.norms", "--show", "--json", *reading).json["cells"]
    assert [cell["variant"] for cell in found] == ["no_decay"]
    found = fednorm("reproduce", "fixbn.tH", "--show", "--json", "--where", "freeze_affine=TRUE").json["cells"]
    assert [cell["setting"]["freeze_affine"] for cell in found] == [True, True]


@pytest.mark.slow
def test_centralized_fixbn_bears_the_rate_of_its_quick_run(tmp_path: Path) -> None:
    arguments = ["reproduce", "fixbn.fedtan", "--quick", "--methods", "centralized_fixbn", "--work", str(tmp_path)]
    done = fednorm(*arguments)
    assert done.code == 0, done.err
    played = "fixbn.fedtan: 1 run to play, small_resnet on fashion_mnist_small; a quick run, not the paper's setting\n"
    assert done.out.startswith(played)
    assert "played: small_resnet on fashion_mnist_small; settings above name the paper's cells" in done.out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "give one of: an experiment such as fixbn.norms, --list, or --next"),
        (["fixbn.t1", "--list"], "give one of: an experiment such as fixbn.norms, --list, or --next"),
        (["fixbn.t9"], "experiment 'fixbn.t9' is not known"),
        (["fixbn.t1", "--methods", "gn"], "method of fixbn.t1 'gn' is not known"),
        (["fixbn.t1", "--precision", "fp8"], "--precision fp8 is not known; give fp32, tf32 or bf16"),
        (["--next", "--minutes", "-1"], "--minutes -1.0 is out of range; give a number above 0"),
        (["--next", "--minutes", "inf"], "--minutes inf is out of range; give a number above 0 and below 1,000,000"),
        (["--next", "--minutes", "1e7"], "is out of range; give a number above 0 and below 1,000,000"),
        (["fixbn.t1", "--show", "--results", "nowhere"], "--results nowhere is no folder; give the folder in which"),
        (["--list", "--results", "afile"], "--results afile is no folder; give the folder in which the results are"),
        (["--next", "--work", "afile"], "'afile' cannot be written: File exists; choose another place"),
        (["--next", "--results", "afile/x"], "'afile/x' cannot be written: Not a directory; choose another place"),
        (["fixbn.t1", "--show", "--work", "afile", "--results", KEPT], "'afile' cannot be written: "),
        (["fixbn.t1", "--show", "--device", "nonsense"], "device 'nonsense' is not known; give auto, cpu, cuda"),
        (["--list", "--device", "nonsense"], "device 'nonsense' is not known; give auto, cpu, cuda"),
        (["--next", "--device", "nonsense"], "device 'nonsense' is not known; give auto, cpu, cuda"),
        (["fixbn.t1", "--seeds", "x"], "--seeds x cannot be read"),
        (["--next", "--data-dir", "nowhere"], "--data-dir nowhere is no folder; give the folder in which the data"),
        (["fixbn.t1", "--seeds", ""], "--seeds cannot be read; give a number of seeds"),
        (["fixbn.t1", "--seeds", "99999999999"], "--seeds 99999999999 is out of range; give at most 1,000"),
        (["fixbn.t1", "--methods", ""], "method of fixbn.t1 '' is not known"),
        (["fixbn.momentum", "--where", "momentum"], "--where momentum has no value; write --where AXIS=VALUE"),
        (["fixbn.momentum", "--where", "norm=bn"], "setting of fixbn.momentum 'norm' is not known"),
        (["fixbn.momentum", "--where", "momentum=locl"], "momentum of fixbn.momentum 'locl' is not known; did you"),
        (
            ["fixbn.more_clients", "--where", "clients=5", "--where", "participation=0.5", "--show"],
            "no cell of fixbn.more_clients has clients=5 and participation=0.5 together; "
            "with participation=0.5 there is clients=100; with clients=5 there is participation=1\n",
        ),
        (
            ["fixbn.norms", "--where", "variant=bare_in", "--methods", "fedavg_bn"],
            "variant=bare_in of fixbn.norms is there for fedavg_in alone; give one of these as --methods",
        ),
        (
            ["fixbn.tH", "--where", "freeze_affine=True", "--methods", "fixbn"],
            "freeze_affine=true of fixbn.tH is there for fixbn_affine_only, fixbn_stats_affine alone",
        ),
        (["--next", "--where", "momentum=local"], "--where has no meaning with --next; leave it out"),
        (["fixbn.t1", "--minutes", "3"], "--minutes has no meaning with 'fixbn.t1'; leave it out"),
        (["--list", "--show"], "--show has no meaning with --list; leave it out"),
        (["--next", "--quick"], "--quick has no meaning with --next; leave it out"),
        (["--next", "--seeds", "1"], "--seeds has no meaning with --next; leave it out"),
        (["--next", "--methods", "fixbn"], "--methods has no meaning with --next; leave it out"),
        (["fixbn.t1", "--quick", "--results", "x"], "--results x is for the papers' settings, and a quick run is not"),
    ],
)
def test_wrong_input_is_refused_in_a_line(
    arguments: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "afile").write_text("")
    done = fednorm("reproduce", *arguments)
    assert done.code == 2
    assert text in done.err
    assert done.err.count("\n") == 1
    assert done.out == ""
