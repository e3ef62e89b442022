"""Recipes of the papers' experiments: every cell is a run that can be made, and some of them worked out by hand."""

from __future__ import annotations

from functools import cache

import pytest

from fednorm.core.expression import parse_term
from fednorm.core.schedule import lr_factor
from fednorm.data.augment import parse as parse_augmentation
from fednorm.data.federation import Federation
from fednorm.data.load import find_dataset
from fednorm.data.partition import find_partition
from fednorm.models.registry import MODELS
from fednorm.running.config import DataConfig, RunConfig, flat
from fednorm.running.plan import build_federation, make_plan
from fednorm.scoring.probes import find_probes
from fednorm.studies.client_statistics import Look, looks_of
from fednorm.studies.estimate import seconds_of
from fednorm.studies.library import key_of
from fednorm.studies.published import experiments
from fednorm.studies.study import Study, StudyCell, all_studies, find_study

IDS = list(experiments())


def cell(id: str, method: str, variant: str = "", **setting: object) -> StudyCell:
    """The one cell of a study with this method and setting."""
    [found] = [
        each
        for each in find_study(id).cells(variants=True)
        if each.method == method and each.variant == variant and setting.items() <= each.setting.items()
    ]
    return found


def check_names(config: RunConfig) -> None:
    """Everything that a config names is known and takes its options."""
    model = parse_term(config.model, "model", "resnet20")
    assert model.name in MODELS
    assert set(model.options) <= set(MODELS[model.name].options)
    division = parse_term(config.data.partition, "partition", "iid")
    find_partition(division.name, division.options)
    find_dataset(config.data.name)
    find_probes(config.eval.probes)
    parse_augmentation(config.train.augment)
    lr_factor(config.train.schedule, 1, config.rounds)


@pytest.mark.parametrize("id", IDS)
def test_every_published_number_has_a_run(id: str) -> None:
    study = find_study(id)
    cells = study.cells()
    if study.experiment.cells:
        assert [each.published for each in cells] == list(study.experiment.cells)
    assert set(study.experiment.methods) <= {each.method for each in cells}
    assert set(study.experiment.methods) <= set(study.recipe.methods)
    for each in study.cells(variants=True):
        check_names(each.config)


@pytest.mark.parametrize("id", IDS)
def test_a_quick_run_needs_no_files_and_has_every_method(id: str) -> None:
    study = find_study(id)
    quick = study.cells(quick=True)
    assert {each.method for each in quick} == {each.method for each in study.cells()}
    for each in quick:
        check_names(each.config)
        assert each.config.data.name == "fashion_mnist_small"
        assert each.config.model in ("small_resnet", "fedbs_mnist_cnn")
        assert each.config.rounds <= 240
    assert len({key_of(each.config) for each in quick}) <= 18


@cache
def embedded(data: DataConfig) -> Federation:
    return build_federation(RunConfig(data=data))


def distinct_quick_runs() -> list[StudyCell]:
    """A cell for each way in which quick runs differ in what is built of them."""
    found: dict[object, StudyCell] = {}
    for study in all_studies():
        for each in study.cells(quick=True):
            config = each.config
            one = config.train.batch_size == 1
            found.setdefault((config.method, config.model, config.train.optimizer, one, bool(config.eval.probes)), each)
    return list(found.values())


@pytest.mark.slow
def test_quick_runs_can_be_made_ready() -> None:
    for each in distinct_quick_runs():
        make_plan(each.config, federation=embedded(each.config.data))


def test_studies_stand_in_a_queue_without_gaps() -> None:
    places = [study.recipe.place for study in all_studies()]
    assert places == list(range(1, len(experiments()) + 1))
    first = [study.id for study in all_studies()[:11]]
    assert first[:5] == [f"fixbn.{name}" for name in ("t1", "norms", "tH", "tI", "decoupled")]
    assert first[5:9] == ["async.time", "async.fedrevive", "async.norms", "async.norms.own"]
    assert first[9:] == ["fixbn.momentum", "fixbn.dynamics"]


def test_what_has_to_be_fetched_comes_last() -> None:
    needed = [study.cells()[0].config.data.name for study in all_studies()]
    assert needed[-5:] == ["tiny_imagenet", "tiny_imagenet", "domainnet10", "cityscapes", "imagenet1k"]
    assert not {"tiny_imagenet", "domainnet10", "cityscapes", "imagenet1k"} & set(needed[:-5])


@pytest.mark.parametrize("study", all_studies(), ids=IDS)
def test_every_recipe_says_what_it_asks_and_how_it_is_drawn(study: Study) -> None:
    recipe = study.recipe
    assert recipe.about.endswith("?")
    assert recipe.seeds == (0, 1, 2)
    kinds = recipe.figure["kind"]
    assert {kinds} if isinstance(kinds, str) else set(kinds)
    for axis in (recipe.figure.get(key) for key in ("x", "y", "lines")):
        assert axis is None or axis in recipe.axes
    assert all(variant["about"] for variant in recipe.variants.values())


def test_methods_of_a_study_differ_in_nothing_but_the_method() -> None:
    """No baseline is tuned otherwise than ours; with maintained momentum, the rate makes steps of the same length."""
    for study in all_studies():
        by_setting: dict[str, set[tuple[object, ...]]] = {}
        for each in study.cells():
            train = each.config.train
            shown = {key: value for key, value in each.setting.items() if key not in each.describing}
            step = round(train.lr / (1 - train.momentum), 9)
            # On a clock rounds are versions, of which each strategy makes its own number; time is what is the same.
            rounds = 0 if each.config.clock.concurrency else each.config.rounds
            told = (step, rounds, train.batch_size, train.schedule, train.weight_decay, train.augment)
            by_setting.setdefault(str(shown), set()).add(told)
        assert all(len(told) == 1 for told in by_setting.values()), study.id


def test_one_step_a_round() -> None:
    config = cell("fixbn.t1", "fedavg_bn").config
    values = flat(config)
    assert config.rounds == 128 * 50_000 // (5 * 20 * 1) == 64_000
    assert (values["train.local_steps"], values["train.lr"], values["train.momentum"]) == (1, 0.2, 0.0)
    assert (values["train.batch_size"], values["train.weight_decay"]) == (20, 1e-4)
    assert (values["train.schedule"], values["train.augment"]) == ("step", "crop(2)+flip")
    assert (values["data.name"], values["data.partition"], values["data.clients"]) == ("cifar10", "shards", 5)
    assert cell("fixbn.t1", "centralized_gn").config.method == "centralized+gn(groups=2)"
    other = cell("fixbn.t1", "fedavg_bn", variant="lr_0_02").config
    assert flat(other) == {**values, "train.lr": 0.02}


def test_a_hundred_steps_a_round() -> None:
    config = cell("fixbn.norms", "fixbn").config
    assert config.rounds == 128 * 50_000 // (5 * 20 * 100) == 640
    assert (config.train.local_steps, config.train.lr, config.train.momentum) == (100, 0.02, 0.9)
    assert cell("fixbn.norms", "fedavg_gn_ws").config.method == "fedavg+gn(groups=2)+ws"
    sorted_classes = cell("fixbn.norms", "fixbn", variant="sorted_classes").config
    assert sorted_classes.data.partition == "sorted_blocks"


def test_studies_share_their_runs() -> None:
    def key(*args: str, **setting: object) -> str:
        return key_of(cell(*args, **setting).config)

    assert key("fixbn.tH", "fixbn") == key("fixbn.norms", "fixbn")
    assert key("fixbn.tI", "fedavg_gn", gn_groups=2) == key("fixbn.norms", "fedavg_gn")
    assert key("fixbn.decoupled", "centralized_bn") == key("fixbn.t1", "centralized_bn")
    assert key("fixbn.f1", "fedavg_gn") == key("fixbn.t1", "fedavg_gn")
    grid = {"partition": "shards", "budget": "epochs", "model": "resnet20"}
    assert key("fixbn.grid.cifar10", "fedavg_bn", local_steps="1", **grid) == key("fixbn.t1", "fedavg_bn")
    assert key("fixbn.grid.cifar10", "fixbn", local_steps="100", **grid) == key("fixbn.norms", "fixbn")
    assert key("fixbn.batchsize", "fixbn", batch_size="20") == key("fixbn.f1", "fixbn")
    assert key("fedwon.f6", "fedwon") == key("fedwon.t6", "fedwon", partition="dirichlet_0.5")
    assert key("fedbs.cifar10.local", "fedbs") == key("fedbs.cifar10.unbalanced", "fedbs")
    # The paper names one rate for Tiny-ImageNet, so with one step a round all its studies have that.
    tiny = {"local_steps": "1", "dataset": "tiny_imagenet"}
    shared = key("fixbn.grid.tiny", "fedavg_bn", local_steps="1", partition="shards", budget="epochs")
    assert key("fixbn.local_steps_curves", "fedavg_bn", **tiny) == shared
    assert key("fixbn.momentum", "fedavg_bn", momentum="reset", **tiny) == shared


def test_whichever_study_plays_a_run_keeps_what_another_draws() -> None:
    looks = looks_of(all_studies())
    drawn = Look(layers=(4, 5), clients=(0, 1))
    assert looks[key_of(cell("fedwon.t1.digits", "fedbn", domain="average").config)] == drawn
    quick = find_study("fedwon.t1.digits").cells(quick=True, methods=["fedbn"])
    assert looks[key_of(quick[0].config)] == drawn
    assert key_of(cell("fedwon.t1.digits", "silobn", domain="average").config) not in looks


def test_a_reading_of_one_backbone_is_no_reading_of_the_other() -> None:
    other = [each for each in find_study("fixbn.t3").cells(variants=True) if each.variant]
    assert {(each.setting["backbone"], each.config.model) for each in other} == {
        ("resnet50", "deeplabv3plus(backbone=resnet18)")
    }
    assert len(other) == 3


def test_a_reading_that_changes_nothing_is_no_second_run() -> None:
    clipped = [each.method for each in find_study("fedwon.t2").cells(variants=True) if each.variant]
    assert set(clipped) == {"fedwon"}
    more = [each for each in find_study("fixbn.more_clients").cells(variants=True) if each.variant]
    assert "5" not in {each.setting["clients"] for each in more}
    assert {each.config.rounds for each in more} == {640}


def test_at_500_steps_both_budgets_are_the_same_run() -> None:
    place = {"partition": "iid", "model": "resnet20"}
    both = [cell("fixbn.grid.cifar10", "fedavg_bn", local_steps="500", budget=b, **place) for b in ("epochs", "rounds")]
    assert both[0].config == both[1].config
    assert both[0].config.rounds == 128
    few = cell("fixbn.grid.cifar10", "fedavg_bn", local_steps="2500", budget="epochs", **place).config
    assert few.rounds == 26


def test_momentum_that_is_maintained_has_the_rate_of_its_step() -> None:
    place = {"local_steps": "1", "dataset": "cifar10"}
    reset, kept = (cell("fixbn.momentum", "fedavg_gn", momentum=m, **place).config for m in ("reset", "global"))
    assert (reset.method, reset.train.lr, reset.train.momentum) == ("fedavg+gn(groups=2)", 0.2, 0.0)
    assert (kept.train.lr, kept.train.momentum) == (0.02, 0.9)
    assert kept.method == "fedavg+gn(groups=2)+global-momentum"


def test_the_setting_of_fedtan() -> None:
    config = cell("fixbn.fedtan", "fedtan", partition="non_iid").config
    assert (config.rounds, config.train.local_steps, config.train.batch_size) == (10_000, 5, 128)
    rates = [config.train.lr * lr_factor(config.train.schedule, r, config.rounds) for r in (6_000, 6_001, 8_001)]
    assert rates == pytest.approx([0.5, 0.05, 0.005])
    assert config.data.partition == "sorted_blocks"
    assert cell("fixbn.fedtan", "centralized_fixbn").config.method == "centralized+fixbn(at=0.5)"


def test_parts_of_fedwon() -> None:
    plain = cell("fedwon.t5", "nonorm", batch_size=32, domain="average").config
    assert (plain.method, plain.train.lr) == ("nonorm+agc(clip=0.1)", 0.08)
    small = cell("fedwon.t5", "fedwon", batch_size=2, domain="average").config
    assert (small.method, small.train.lr, small.train.batch_size) == ("fedwon(use_agc=False)", 0.01, 2)


def test_domains_are_read_off_one_run() -> None:
    cells = [each for each in find_study("fedwon.t1.digits").cells() if each.method == "fedbn"]
    assert len(cells) == 6
    assert len({key_of(each.config) for each in cells}) == 1
    assert [each.selected for each in cells] == ["mnist", "svhn", "usps", "synth_digits", "mnist_m", "average"]
    config = cells[0].config
    assert (config.data.partition, config.data.clients, config.rounds) == ("domain(per_client=743)", 5, 100)
    assert (config.train.lr, config.train.local_epochs, config.train.batch_size) == (0.01, 1, 32)


def test_looks_of_embedded_images_stand_for_domains_in_a_quick_run() -> None:
    found = {each.setting["domain"]: each.selected for each in find_study("fedwon.t3").cells(quick=True)}
    looks = {"mnist": "colour", "svhn": "contrast", "usps": "blur", "synth": "noise", "mnist_m": "fog"}
    assert found == looks
    assert {each.selected for each in find_study("fedwon.t1.office").cells(quick=True)} == {"average"}


def test_combinations_that_a_figure_does_not_have_are_left_out() -> None:
    curves = {(each.setting["local_steps"], each.setting["partition"]) for each in find_study("fixbn.curves").cells()}
    assert ("500", "shards") in curves
    assert ("500", "iid") not in curves
    assert len(curves) == 3 * 5 + 1
    frozen = [each.setting for each in find_study("fixbn.dynamics").cells() if each.method == "fedavg_bn"]
    assert frozen == [{"local_steps": steps, "frozen_at": "0.5"} for steps in ("1", "100")]
    assert cell("fixbn.dynamics", "fixbn", frozen_at="0.25").config.method == "fixbn(at=0.25)"
    batches = {(each.method, each.setting["batch_size"]) for each in find_study("fedwon.f5").cells()}
    assert batches == {("fedwon", "1"), ("fedwon", "2"), ("fedavg_bn", "2"), ("fedbn", "2")}


def test_more_clients_share_the_same_epochs() -> None:
    for each in find_study("fixbn.more_clients").cells():
        cohort = each.config.cohort_size(each.config.data.clients)
        assert each.config.rounds * cohort * 100 * 20 == 128 * 50_000


def test_half_of_the_clients_see_the_data_as_often() -> None:
    half = "half_of_the_clients"
    for method in ("fedavg_bn", "fedavg_bn_posthoc"):
        config = cell("fixbn.posthoc", method, half).config
        assert config.rounds * config.cohort_size(10) * 100 * 20 == 128 * 100_000
    for each in find_study("fixbn.grid.tiny").cells(where={"variant": [half]}, variants=True):
        config = each.config
        assert config.cohort_size(10) == 5
        epochs = config.rounds * 5 * (config.train.local_steps or 0) * 20 / 100_000
        assert config.rounds == 128 if each.setting["budget"] == "rounds" else epochs == pytest.approx(128, rel=0.005)


def test_clients_that_come_one_by_one() -> None:
    config = cell("async.time", "fedbuff", times="shifted").config
    assert config.method == "fedbuff(b=2,lr=0.05,staleness=None)+nonorm"
    assert (config.clock.times, config.clock.concurrency, config.rounds) == ("shifted", 100, 25_662)
    assert (config.data.partition, config.data.clients) == ("dir_client(alpha=0.5,size=350)", 1000)
    assert (config.train.local_steps, config.train.batch_size, config.train.optimizer) == (25, 32, "adam")
    shared = cell("async.fedrevive", "fedbuff", times="shifted")
    assert key_of(shared.config) == key_of(config)
    assert shared.time == 5.0
    assert cell("async.time", "fedbuff", times="default").time is None
    waits = cell("async.time", "fedavg_clock").config
    assert (waits.method, waits.rounds, waits.eval.every) == ("sync(lr=1.4)+nonorm", 28, 1)


def test_every_run_on_a_clock_fits_a_hold_of_a_gpu() -> None:
    for id in ("async.time", "async.fedrevive", "async.norms", "async.norms.own"):
        for each in find_study(id).cells(variants=True):
            assert seconds_of(each.config, 1, on_gpu=True) < 25 * 60
