"""Cells, readings and rankings of studies, by hand; whole studies are played in test_reproduce.py."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fednorm.errors import CheckpointError, ConfigError
from fednorm.running.config import RunConfig, to_dict, updated
from fednorm.studies.beside import (
    DIVERGED,
    agreement_text,
    precision_text,
    ranking_text,
    sentences,
    table_rows,
    to_json,
)
from fednorm.studies.estimate import seconds_of, usual_seconds
from fednorm.studies.library import Diverged, Library, Record, key_of, make_record
from fednorm.studies.measured import Measured, agreement, measured, ranking
from fednorm.studies.playing import Place
from fednorm.studies.published import Experiment, PublishedCell, experiments, find_experiment
from fednorm.studies.queue import missing_jobs, standing
from fednorm.studies.recipes import Score, StudyRecipe
from fednorm.studies.study import Study, StudyCell


def experiment(*cells: PublishedCell, methods: tuple[str, ...] = ()) -> Experiment:
    keys = methods or tuple(dict.fromkeys(cell.method for cell in cells))
    return Experiment("paper.t1", "table", "A paper: Table 1", "mnist", "", cells, keys, (), ())


def recipe(**fields: Any) -> StudyRecipe:
    usual: dict[str, Any] = {
        "run": {"rounds": 4, "data": {"clients": 3}},
        "methods": {"fedavg_bn": "fedavg", "fixbn": {"method": "fixbn", "set": {"train.lr": 0.3}}},
        "axes": {},
        "score": Score(),
    }
    return StudyRecipe(**{**usual, **fields})


def record(config: RunConfig, final: float, *, seed: int = 0, precision: str = "fp32", peak: float = 0.0) -> Record:
    run: Any = {
        "method": config.method,
        "seed": seed,
        "metric": "accuracy",
        "final": {"pooled": {"accuracy": final}},
        "curves": {"round": [1, 2], "pooled": [max(peak, final), final]},
        "ran": {"precision": precision, "device_name": "a machine", "device": "cpu"},
        "seconds": 5.0,
    }
    row: Any = {"round": 2, "eval": {}, "train_loss": 0.5}
    return make_record(config, run, [row, {"round": 1, "train_loss": 9.0}], [], {"commit": "abc"})  # pyright: ignore


def diverged(config: RunConfig, round: int, *, seed: int = 0, precision: str = "fp32") -> Diverged:
    ran = {"precision": precision, "device_name": "a machine", "device": "cpu"}
    why = f"diverged in round {round}, client 0: its loss is nan"
    run: Any = {"method": config.method, "seed": seed, "diverged_in": round, "why": why, "ran": ran}
    return Diverged(key_of(config), to_dict(config), run, {"commit": "abc", "command": "fednorm reproduce"})


def cell(method: str, mean: float, std: float | None = None, **setting: Any) -> StudyCell:
    config = updated(RunConfig(), {"method": method})
    return StudyCell("paper.t1", method, setting, "", config, Score(), PublishedCell(method, setting, mean, std))


def test_every_published_experiment_is_read() -> None:
    assert len(experiments()) == 42
    norms = find_experiment("fixbn.norms")
    assert norms.where.endswith("Table 4")
    assert {each.method: (each.mean, each.std) for each in norms.cells}["fixbn"] == (76.56, 0.66)


def test_an_unknown_experiment_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"experiment 'fixbn.norm' is not known; did you mean 'fixbn.norms'"):
        find_experiment("fixbn.norm")


def test_a_cells_config_has_the_fields_of_method_axis_and_variant() -> None:
    axes = {"partition": {"iid": {"data.partition": "iid"}, "skew": {"data.partition": "shards", "train.lr": 0.7}}}
    variants = {"long": {"about": "more rounds", "set": {"rounds": 9}}}
    published = (
        PublishedCell("fixbn", {"partition": "iid"}, 50.0, None),
        PublishedCell("fixbn", {"partition": "skew"}, 40.0, None),
    )
    cells = Study(experiment(*published), recipe(axes=axes, variants=variants)).cells(variants=True)
    told = [
        (each.variant, each.config.data.partition, each.config.train.lr, each.config.rounds, each.config.method)
        for each in cells
    ]
    assert told == [
        ("", "iid", 0.3, 4, "fixbn"),
        ("", "shards", 0.7, 4, "fixbn"),
        ("long", "iid", 0.3, 9, "fixbn"),
        ("long", "shards", 0.7, 9, "fixbn"),
    ]


def test_an_expression_may_name_an_axis() -> None:
    axes = {"mu": {"0.5": {}, "2.0": {}}}
    methods = {"fedprox_bn": "fedprox(mu={mu})"}
    study = Study(experiment(methods=("fedprox_bn",)), recipe(axes=axes, methods=methods))
    assert [each.config.method for each in study.cells()] == ["fedprox(mu=0.5)", "fedprox(mu=2.0)"]


def test_without_digits_every_combination_is_a_cell() -> None:
    axes = {"a": {"1": {}, "2": {}}, "b": {"x": {}, "y": {}}}
    study = Study(experiment(methods=("fedavg_bn", "fixbn")), recipe(axes=axes))
    assert len(study.cells()) == 8
    assert len(study.cells(methods=["fixbn"])) == 4


@pytest.mark.parametrize(
    ("published", "text"),
    [
        (PublishedCell("fedbn", {}, 1.0, None), "recipe of paper.t1 has no method 'fedbn'; add it below [methods]"),
        (PublishedCell("fixbn", {"size": 3}, 1.0, None), "has no size='3'; add it below [axes.size]"),
    ],
)
def test_a_recipe_that_lacks_something_says_what(published: PublishedCell, text: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Study(experiment(published), recipe()).cells()
    assert text in str(refusal.value)


def test_a_method_that_is_not_of_the_study_is_refused() -> None:
    study = Study(experiment(PublishedCell("fixbn", {}, 1.0, None)), recipe())
    with pytest.raises(ConfigError, match=r"method of paper.t1 'fixbm' is not known; did you mean 'fixbn'"):
        study.cells(methods=["fixbm"])


def test_the_key_is_of_what_is_computed() -> None:
    config = RunConfig()
    elsewhere = {"seed": 3, "engine.precision": "tf32", "engine.threads": 2, "data.dir": "x", "eval.chunk": 7}
    assert key_of(updated(config, elsewhere)) == key_of(config)
    for field, value in {"train.lr": 0.9, "rounds": 7, "method": "fixbn", "eval.every": 3}.items():
        assert key_of(updated(config, {field: value})) != key_of(config)


def test_what_is_kept_is_found_again(tmp_path: Path) -> None:
    config = updated(RunConfig(), {"method": "fixbn(at=0.5)", "data.dir": None})
    library = Library(tmp_path)
    path = library.save(record(config, float("nan"), seed=4, precision="bf16"))
    assert path.name == f"fashion_mnist_small-small_resnet-fixbn_at=0.5-{key_of(config)}-seed4-bf16.json"
    (found,) = Library(tmp_path).records(config)
    assert found.run["final"]["pooled"]["accuracy"] != found.run["final"]["pooled"]["accuracy"]  # NaN
    assert found.train_loss == {"round": [2], "loss": [0.5]}
    assert Library(tmp_path).has(config, 4)
    assert not Library(tmp_path).has(config, 0)


@pytest.mark.parametrize("text", ["[]", "{}", '{"version": 2}', '{"version": 1, "key": "x"}', "{"])
def test_a_foreign_file_in_the_library_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"a\.json"):
        Library(tmp_path).has(RunConfig(), 0)


def test_the_precision_with_most_seeds_is_shown(tmp_path: Path) -> None:
    asked = cell("fedavg", 50.0)
    library = Library(tmp_path)
    for seed, precision, value in [(0, "bf16", 10.0), (1, "bf16", 20.0), (0, "tf32", 90.0)]:
        library.save(record(asked.config, value, seed=seed, precision=precision))
    (both,) = measured([asked], library)
    assert str(both.ours) == "15.0 ± 7.1"
    (first,) = measured([asked], library, [0])
    assert str(first.ours) == "90.0"  # of equally many, the most exact
    assert first.difference == 40.0
    assert precision_text(both, both.others[0]) == "fedavg, seed 0: bf16 10.0, tf32 90.0"
    (exact,) = measured([asked], library, precision="tf32")
    assert str(exact.ours) == "90.0"  # as it was asked for
    assert library.has(asked.config, 1)
    assert not library.has(asked.config, 1, "tf32")


def test_a_seed_counts_in_the_precision_that_is_shown(tmp_path: Path) -> None:
    study = Study(experiment(PublishedCell("fedavg_bn", {}, 54.0, None)), recipe(seeds=(0, 1, 2)))
    (asked,) = study.cells()
    library = Library(tmp_path)
    for seed, precision in [(0, "tf32"), (1, "bf16"), (2, "bf16")]:
        library.save(record(asked.config, 50.0, seed=seed, precision=precision))
    assert (standing(study, library).done, standing(study, library).begun) == (0, 1)
    assert [job.seeds for job in missing_jobs([study], library.has)] == [(0,)]
    exact = Place(library, tmp_path / "work", "cpu", "tf32")
    assert [job.seeds for job in missing_jobs([study], exact.has)] == [(1, 2)]
    library.save(record(asked.config, 50.0, precision="bf16"))
    assert standing(study, library).done == 1
    assert standing(study, library, "tf32").done == 0
    assert list(missing_jobs([study], library.has)) == []


def test_what_a_machine_has_played_in_its_own_precision_is_not_played_there_again(tmp_path: Path) -> None:
    study = Study(experiment(PublishedCell("fedavg_bn", {}, 54.0, None)), recipe(seeds=(0, 1, 2)))
    (asked,) = study.cells()
    here = Place(Library(tmp_path), tmp_path / "work", "cpu")
    here.library.save(record(asked.config, 50.0, precision="fp32"))
    assert [job.seeds for job in missing_jobs([study], here.has)] == [(1, 2)]
    for seed in (1, 2):
        here.library.save(record(asked.config, 50.0, seed=seed, precision="bf16"))
    assert standing(study, here.library).done == 0
    assert list(missing_jobs([study], here.has)) == []


def test_estimates_grow_with_the_pixels_that_are_trained_on() -> None:
    def steps(model: str, **fields: Any) -> float:
        told = {"rounds": 100_000, "model": model, "data.clients": 100, "train.local_steps": 10}
        told |= {"data.name": "cifar10", **{name.replace("_", ".", 1): value for name, value in fields.items()}}
        return seconds_of(updated(RunConfig(), told), 1, on_gpu=True)

    small = steps("resnet18")
    assert steps("resnet18", data_size=64) == pytest.approx(4 * small, rel=0.1)
    assert steps("resnet18", data_name="tiny_imagenet") == pytest.approx(4 * small, rel=0.1)
    assert steps("resnet18", train_augment="crop(2)+flip") == small
    assert steps("resnet18", data_size=64, train_augment="window(32)") == pytest.approx(small, rel=0.01)
    assert steps("resnet18", data_size=64, train_augment="resized_crop(0.08)") == steps("resnet18", data_size=64)
    assert steps("resnet18(stem=imagenet)", data_size=128) == pytest.approx(small, rel=0.01)
    # Timed at 192 pixels, whole images are 1024 x 2048.
    city = steps("deeplabv3plus", data_name="cityscapes", train_augment="window(768)")
    assert city == pytest.approx(16 * steps("deeplabv3plus", data_size=192), rel=0.1)


def test_a_run_takes_what_others_of_its_precision_took_seed_by_seed(tmp_path: Path) -> None:
    config = updated(RunConfig(), {"rounds": 1000, "data.name": "cifar10"})
    here = Place(Library(tmp_path), tmp_path / "work", "cpu")
    guessed = [seconds_of(config, count, on_gpu=False) for count in (1, 2)]
    assert [usual_seconds(config, count, here) for count in (1, 2)] == guessed
    for seed, precision, share in [(0, "fp32", 40.0), (1, "fp32", 40.0), (0, "tf32", 900.0)]:
        kept = record(config, 50.0, seed=seed, precision=precision)
        kept.run["seconds"] = share
        here.library.save(kept)
    # Two seeds in one stack took 80 seconds, so one alone takes less than that and more than half of it.
    assert usual_seconds(config, 2, here) == pytest.approx(80.0)
    assert usual_seconds(config, 1, here) == pytest.approx(80.0 * guessed[0] / guessed[1])
    assert 40.0 < usual_seconds(config, 1, here) < 80.0


def test_a_domain_is_the_mean_of_its_clients() -> None:
    asked = replace(
        cell("fedavg", 50.0, domain="synth"), score=Score("own_client", "domain", {"synth": "synth_digits"})
    )
    kept = record(asked.config, 0.0)
    scores = {"accuracy": 40.0, "per_client": {"0": 10.0, "1": 30.0, "2": 80.0}}
    kept.run["final"] = {"own_client": scores}  # pyright: ignore[reportArgumentType]
    kept = replace(kept, client_domains=["synth_digits", "synth_digits", "mnist"])
    found = Measured(asked, (kept,))
    assert found.ours is not None
    assert found.ours.mean == 20.0
    assert found.peak is None


def test_a_seed_that_diverged_is_told_of_and_no_number(tmp_path: Path) -> None:
    asked, other = cell("fixbn", 76.0, 0.5), cell("fedavg", 54.0, 4.0)
    library = Library(tmp_path)
    library.save(record(asked.config, 70.0))
    library.save(diverged(asked.config, 321, seed=1))
    library.save(diverged(asked.config, 400, seed=2))
    library.save(record(other.config, 50.0, precision="bf16"))
    library.save(diverged(other.config, 7, precision="tf32"))
    library.save(record(other.config, 51.0, seed=1, precision="bf16"))
    found = measured([asked, other], Library(tmp_path))  # as it is read
    rows = table_rows(found)
    assert rows[0] == ["fixbn", "", "76.0 ± 0.5", "70.0, 2 of 3 seeds diverged in rounds 321, 400", "-", "70.0", "3"]
    assert rows[1][3] == "50.5 ± 0.7"
    study = Study(experiment(PublishedCell("fixbn", {}, 76.0, 0.5)), recipe())
    assert (ranking(found).pairs, agreement(found).compared) == (0, 1)
    told = to_json(study, found, quick=False)
    assert [(run["seed"], run["round"], run["commit"]) for run in told["cells"][0]["diverged"]] == [
        (1, 321, "abc"),
        (2, 400, "abc"),
    ]
    assert told["cells"][0]["ours"] == {"mean": 70.0, "std": 0.0, "n": 1}
    assert "fedavg, seed 0: bf16 50.0, tf32 diverged in round 7" in told["notes"]
    assert DIVERGED in told["notes"]


def test_a_run_that_did_not_diverge_when_played_anew_takes_the_place_of_one_that_did(tmp_path: Path) -> None:
    library = Library(tmp_path)
    lost = library.save(diverged(RunConfig(), 3))
    assert library.save(record(RunConfig(), 50.0)) == lost
    assert [type(outcome) for outcome in library.outcomes(RunConfig())] == [Record]


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ({"diverged_in": "321"}, "diverged_in is str"),
        ({"why": None}, "why is NoneType"),
        ({"seed": "0"}, "seed is str"),
        ({"ran": {"precision": "fp8"}}, "precision 'fp8' is not known"),
    ],
)
def test_a_damaged_file_of_a_run_that_diverged_is_refused(tmp_path: Path, damage: dict[str, object], why: str) -> None:
    path = Library(tmp_path).save(diverged(RunConfig(), 3))
    stored = json.loads(path.read_text())
    path.write_text(json.dumps({**stored, "run": stored["run"] | damage}))
    with pytest.raises(CheckpointError, match=re.escape(why)):
        Library(tmp_path).has(RunConfig(), 0)


def results(*pairs: tuple[StudyCell, float]) -> list[Measured]:
    return [Measured(asked, (record(asked.config, value),)) for asked, value in pairs]


def test_methods_rank_as_in_the_paper_or_not() -> None:
    a, b, c = cell("fixbn", 76.0, 0.5), cell("fedavg", 54.0, 4.0), cell("fedbn", 57.0, 1.0)
    found = ranking(results((a, 70.0), (b, 40.0), (c, 75.0)))
    # FedAvg and FedBN are 3 apart with spreads of 4 and 1 together 5: the paper does not tell them apart.
    assert (found.agree, found.pairs) == (1, 2)
    assert found.differ == ("fixbn is above fedbn in the paper and not here",)
    assert "1 of 2 pairs" in ranking_text(found)


def test_methods_are_ranked_within_a_setting() -> None:
    a, b = cell("fixbn", 76.0, domain="mnist"), cell("fedavg", 54.0, domain="usps")
    assert ranking(results((a, 1.0), (b, 2.0))).pairs == 0
    told = frozenset({"domain"})
    same = [replace(each, describing=told) for each in (a, b)]
    assert ranking(results((same[0], 1.0), (same[1], 2.0))).pairs == 1


def test_a_quick_run_is_said_to_be_one_and_not_set_against_the_paper() -> None:
    study = Study(experiment(PublishedCell("fixbn", {}, 76.0, 0.5)), recipe())
    full, quick = (results((study.cells(quick=quick)[0], 70.0)) for quick in (False, True))
    assert table_rows(quick) == [["fixbn", "", "-", "70.0", "-", "70.0", "1"]]
    assert table_rows(full) == [["fixbn", "", "76.0 ± 0.5", "70.0", "-6.0", "70.0", "1"]]
    assert next(sentences(study, quick, quick=True)).startswith("quick run")
    told = json.loads(json.dumps(to_json(study, quick, quick=True)))
    assert told["quick"] is True
    assert (told["cells"][0]["paper"], told["cells"][0]["difference"], told["ranking"]) == (None, None, None)
    assert not [text for text in told["notes"] if text.startswith(("order of methods", "means"))]
    assert "played: small_resnet on fashion_mnist_small; settings above name" in told["notes"][1]
    whole = to_json(study, full, quick=False)
    assert (whole["cells"][0]["paper"], whole["cells"][0]["difference"]) == ({"mean": 76.0, "std": 0.5}, -6.0)
    assert whole["ranking"] == {"agree": 0, "pairs": 0, "differ": []}


def test_a_mean_agrees_within_the_papers_spread_or_ours_where_it_has_none() -> None:
    cells = [cell("fixbn", 76.0, 0.5), cell("fedavg", 54.0, 4.0), cell("fedbn", 57.0), cell("silobn", 57.0)]
    played = results((cells[0], 75.0), (cells[1], 51.0), (cells[2], 57.0))
    varied = Measured(cells[3], tuple(record(cells[3].config, score, seed=at) for at, score in enumerate((55.0, 58.0))))
    found = agreement([*played, varied])
    # FixBN is 1 off where the paper has 0.5; one seed of FedBN tells of no spread; SiloBN is 0.5 off with one of 2.1.
    assert [each.cell.method for each in found.within] == ["fedavg", "silobn"]
    assert [each.cell.method for each in found.beyond] == ["fixbn"]
    (text,) = agreement_text(found)
    assert text == (
        "means: 2 of 3 within the paper's spread, or within ours where it prints none; beyond it fixbn (-1.0)"
    )
    assert list(agreement_text(agreement([]))) == []


def test_where_a_paper_prints_no_digits_nothing_is_compared() -> None:
    unpublished = replace(cell("fixbn", 1.0), published=None)
    told = list(sentences(Study(experiment(methods=("fixbn",)), recipe()), results((unpublished, 70.0)), quick=False))
    assert told[0] == "no digits were published for this: there is nothing to set ours against"
    assert not [text for text in told if text.startswith(("order of methods", "means"))]


def test_a_study_is_open_partly_done_or_done(tmp_path: Path) -> None:
    study = Study(
        experiment(PublishedCell("fedavg_bn", {}, 54.0, None), PublishedCell("fixbn", {}, 76.0, None)),
        recipe(seeds=(0, 1), variants={"long": {"set": {"rounds": 9}}}),
    )
    library = Library(tmp_path)
    assert standing(study, library).state == "open"
    assert [(job.label, job.seeds) for job in missing_jobs([study], library.has)] == [
        ("fedavg_bn", (0, 1)),
        ("fixbn", (0, 1)),
        ("fedavg_bn [long]", (0, 1)),
        ("fixbn [long]", (0, 1)),
    ]
    main = study.cells()
    for asked, seed in [(main[0], 0), (main[1], 0), (main[1], 1)]:
        library.save(record(asked.config, 1.0, seed=seed))
    assert next((job.label, job.seeds) for job in missing_jobs([study], library.has)) == ("fedavg_bn", (1,))
    found = standing(study, library)
    assert (found.state, found.cells, found.done, found.begun) == ("partly", 2, 1, 2)
    library.save(record(main[0].config, 1.0, seed=1))
    assert standing(study, library).state == "done"


def test_seeds_that_share_no_stack_are_jobs_of_their_own(tmp_path: Path) -> None:
    on_clock = {"fedavg_bn": "fedbuff(b=2)+fedavg", "fixbn": "fedbuff(b=2)+fixbn"}
    study = Study(
        experiment(PublishedCell("fedavg_bn", {}, 54.0, None), PublishedCell("fixbn", {}, 76.0, None)),
        recipe(seeds=(0, 1), methods=on_clock),
    )
    library = Library(tmp_path)
    jobs = list(missing_jobs([study], library.has))
    assert [(job.label, job.seeds) for job in jobs] == [
        ("fedavg_bn", (0,)),
        ("fixbn", (0,)),
        ("fedavg_bn", (1,)),
        ("fixbn", (1,)),
    ]
    assert len({job.name for job in jobs}) == 4


OF_ANOTHER_RUN = "its key is not that of its config, so it would stand for another run"


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ({"run": 5}, "TypeError: 'int' object is not subscriptable"),
        ({"key": "0" * 12}, f"ValueError: {OF_ANOTHER_RUN}"),
        ({"config": {"rounds": 9}}, "KeyError: 'data'"),
        ({"config": {**to_dict(RunConfig()), "rounds": 9}}, f"ValueError: {OF_ANOTHER_RUN}"),
        (
            {"config": {**to_dict(RunConfig()), "rouns": 9}},
            "ConfigError: config field 'rouns' is not known; did you mean 'rounds'?",
        ),
        ({"run": {}}, "KeyError: 'metric'"),
        ({"key": []}, "TypeError: key is list"),
        ({"environment": None}, "TypeError: environment is NoneType"),
        ({"train_loss": {"round": [1], "loss": []}}, "ValueError: it has no scores, or not as many losses as rounds"),
        (
            {"train_loss": {"round": [1], "loss": [0.5], "weighted": []}},
            "ValueError: it has no scores, or not as many losses as rounds",
        ),
        ({"probes": [3]}, "TypeError: 'int' object is not subscriptable"),
    ],
)
def test_a_damaged_record_is_refused_by_name_before_it_is_used(
    tmp_path: Path, damage: dict[str, object], why: str
) -> None:
    path = Library(tmp_path).save(record(RunConfig(), 50.0))
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    told = f"'{path}' is no result of a study, or is damaged ({why}); move it elsewhere, and what is missing then is"
    with pytest.raises(CheckpointError, match=re.escape(told)):
        Library(tmp_path).has(RunConfig(), 0)


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        (("ran", "precision"), "fp8", "precision 'fp8' is not known"),
        (("ran",), 3, "'int' object has no attribute 'get'"),
        (("final", "pooled", "accuracy"), "x", "final pooled is str"),
        (("curves",), {"round": [1]}, "'pooled'"),
        (("seed",), "zero", "seed is str"),
    ],
)
def test_a_damaged_run_in_a_record_is_refused(tmp_path: Path, place: Sequence[str], value: object, why: str) -> None:
    path = Library(tmp_path).save(record(RunConfig(), 50.0))
    stored = json.loads(path.read_text())
    within = stored["run"]
    for name in place[:-1]:
        within = within[name]
    within[place[-1]] = value
    path.write_text(json.dumps(stored))
    with pytest.raises(CheckpointError, match=re.escape(why)):
        Library(tmp_path).records(RunConfig())


def test_a_file_in_the_place_of_the_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("")
    with pytest.raises(CheckpointError, match="is no folder, so it holds no results; give the folder they are in"):
        Library(tmp_path / "results").has(RunConfig(), 0)
