"""A folder of images and a table go through check, compare, a kill, resume and export from the command line alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

import fednorm as library
from command import Outcome, fednorm
from fednorm.errors import ConfigError
from fednorm.files import read_json
from fednorm.running.config import RunConfig, from_dict
from fednorm.running.given import config_in
from fednorm.running.own_files import settled_by_files
from own_files import CLIENTS, image_folder, save_image, save_table, table_rows
from test_cli_signals import running, wait_for_rounds

QUICK = ("--rounds", "2", "--local-steps", "1", "--batch-size", "4", "--set", "engine.threads=1", "--quiet")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return image_folder(tmp_path / "images")


@pytest.fixture
def people(tmp_path: Path) -> Path:
    return save_table(tmp_path / "people.csv", table_rows())


def of_table(path: Path) -> tuple[str, ...]:
    return ("--data", f"table:{path}", "--target", "sick", "--client-column", "site")


def stored(folder: Path) -> RunConfig:
    return config_in(read_json(folder / "config.json"))


def refused(*arguments: object) -> str:
    done = fednorm("run", *arguments, "--quiet")
    assert (done.code, done.out) == (2, ""), done.err
    return done.err.strip()


# -- from the first look to an exported model --


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "table"])
def test_check_compare_kill_resume_export(kind: str, tmp_path: Path, images: Path, people: Path) -> None:
    data: tuple[str, ...] = ("--data", "folder:images") if kind == "folder" else of_table(Path("people.csv"))
    checked = fednorm("data", "check", f"folder:{images}") if kind == "folder" else check_table(people)
    assert (checked.code, checked.out.splitlines()[-1]) == (0, "a run would refuse nothing")
    work = (*data, "--rounds", "30", "--local-steps", "1", "--set", "eval.every=30", "--model", "mlp_bn(width=8)")
    settings = (*work, "--set", "engine.threads=1", "--set", "engine.checkpoint_every=2")
    with running("compare", "fedbn", "fedavg", *settings, "--out", "killed", cwd=tmp_path) as process:
        wait_for_rounds(process, tmp_path / "killed" / "fedbn-seed0", 3)
        process.kill()
        process.communicate()
    assert not (tmp_path / "killed" / "result.json").exists()
    resumed = fednorm("resume", tmp_path / "killed", "--json", "--quiet")
    assert resumed.code == 0, resumed.err
    whole = fednorm("compare", "fedbn", "fedavg", *absolute(settings, tmp_path), "-o", tmp_path / "w", "--json", "-q")
    assert [run["digest"] for run in resumed.json["runs"]] == [run["digest"] for run in whole.json["runs"]]
    assert resumed.json["runs"][0]["client_names"] == list(CLIENTS)
    exported = fednorm("export", tmp_path / "killed" / "fedbn-seed0", "--client", "birch")
    assert exported.out == f"{tmp_path}/killed/fedbn-seed0/client-1.safetensors\n"
    with safe_open(exported.out.strip(), "pt") as file:
        about = file.metadata()
    assert (about["client"], about["client_name"]) == ("1", "birch")
    assert json.loads(about["classes"]) == (["cat", "dog"] if kind == "folder" else ["no", "yes"])
    assert json.loads(about["preprocessing"])["kind"] == ("images" if kind == "folder" else "table")


def check_table(path: Path) -> Outcome:
    return fednorm("data", "check", f"table:{path}", "--target", "sick", "--client-column", "site")


def absolute(settings: Sequence[str], folder: Path) -> list[str]:
    """The same settings from another working directory."""
    return [text.replace("folder:", f"folder:{folder}/").replace("table:", f"table:{folder}/") for text in settings]


def test_a_run_says_how_its_data_were_read_and_stores_what_they_decided(tmp_path: Path, people: Path) -> None:
    done = fednorm("run", *of_table(people), *QUICK[:-1], "--out", tmp_path / "run")
    assert done.code == 0, done.err
    assert [line for line in done.out.splitlines() if line.startswith("data: ")] == [
        f"data: table:{people}, 3 clients; model: mlp_bn",
        "data: target sick: classification, 2 classes (no, yes)",
        "data: 20 % of each client's examples, drawn by the seed with the mix of classes, are set aside for tests",
        "data: 3 inputs; columns by kind: number 1, category 1",
        "data: numbers standardised over the 48 training rows of all clients that train, which pools means and "
        "deviations over clients: age 50.56 ± 17.73",
        "data: categories as columns of 0 and 1, all 0 for one not seen in training: city (2)",
    ]
    config = stored(tmp_path / "run")
    assert (config.model, config.data.clients, config.data.partition) == ("mlp_bn", 3, "own")
    assert config.data.name == f"table:{people}"
    assert config.data.digest is not None


def test_other_data_under_the_same_name_are_refused(tmp_path: Path, people: Path) -> None:
    assert fednorm("run", *of_table(people), *QUICK, "--out", tmp_path / "run").code == 0
    before = stored(tmp_path / "run").data.digest
    save_table(people, [*table_rows()[:-1], (30, "X", "cedar", "yes")])
    (tmp_path / "run" / "result.json").unlink()
    for command in (("resume", tmp_path / "run"), ("export", tmp_path / "run")):
        done = fednorm(*command)
        assert done.code == 2
        start, end = done.err.strip().split("digest ")
        assert start == f"error: 'table:{people}' is not what it was when the run began ("
        assert end.endswith(f", was {before}); put the old files back, or start a new run")


def test_regression_and_many_labels_from_a_table(tmp_path: Path, people: Path) -> None:
    done = fednorm("run", "--data", f"table:{people}", "--target", "age", *QUICK, "--json", "-o", tmp_path / "a")
    assert done.json["runs"][0]["metric"] == "rmse"
    assert stored(tmp_path / "a").data.partition == "iid"
    labels = save_table(tmp_path / "l.csv", [(i, i % 2, i // 5 % 2) for i in range(40)], ("x", "p", "q"))
    done = fednorm("run", "--data", f"table:{labels}", "--target", "p,q", *QUICK, "--json", "-o", tmp_path / "b")
    assert done.json["runs"][0]["metric"] == "f1"


def test_an_archive_of_images_is_dealt_by_any_partition(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    x = draw.integers(0, 256, (60, 3, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(60) % 3)
    shift = ("--partition", "feature_shift(severity=0.5)", "--clients", "4", "--model", "mlp_bn(width=8)")
    done = fednorm("run", "--data", f"npz:{tmp_path}/a.npz", *shift, *QUICK, "--json", "-o", tmp_path / "run")
    assert done.code == 0, done.err
    assert "domains" in done.json["runs"][0]["final"]


def test_python_takes_the_same_names(tmp_path: Path, people: Path) -> None:
    work = {"rounds": 2, "local_steps": 1, "threads": 1, "batch_size": 4, "method": "fedbn"}
    mine = library.run(data=f"table:{people}", target="sick", client="site", **work)
    done = fednorm("run", *of_table(people), *QUICK, "--method", "fedbn", "--json", "-o", tmp_path / "run")
    assert mine.runs[0]["digest"] == done.json["runs"][0]["digest"]
    assert [row["name"] for row in mine.per_client()] == list(CLIENTS)
    with pytest.raises(ConfigError, match="takes images, but"):
        library.run(data=f"table:{people}", target="sick", client="site", model="small_resnet", rounds=1)


def test_unseen_clients_and_validation(tmp_path: Path, images: Path) -> None:
    asked = ("--set", "data.unseen=1", "--val-fraction", "0.3", "--model", "mlp_bn(width=8)")
    done = fednorm("run", "--data", f"folder:{images}", *asked, *QUICK, "--json", "-o", tmp_path / "run")
    final = done.json["runs"][0]["final"]
    assert list(final["own_client"]["per_client"]) == ["0", "1"]
    assert list(final["unseen"]["per_client"]) == ["2"]
    assert "validation" in final
    assert refused("--data", f"folder:{images}", "--set", "data.unseen=3") == (
        "error: data.unseen=3 leaves no client of 3 to train; give less"
    )


# -- what cannot be --


def test_what_the_data_decide_cannot_be_asked_for(people: Path, images: Path) -> None:
    table, folder = of_table(people), ("--data", f"folder:{images}")
    assert refused(*table, "--clients", "5") == (
        f"error: 'table:{people}' brings its own 3 clients, not 5; leave out --clients"
    )
    assert refused(*table, "--partition", "shards") == (
        f"error: 'table:{people}' brings its own 3 clients; leave out --partition"
    )
    assert refused(*table, "--model", "small_resnet") == (
        f"error: model 'small_resnet' takes images, but 'table:{people}' has vectors of 3 numbers; use --model mlp_bn, "
        "or one of your own"
    )
    assert refused(*folder, "--target", "sick") == (
        f"error: data.target='sick' is for a table (--data table:FILE), not for 'folder:{images}'; leave it out"
    )
    assert refused("--client-column", "site") == (
        "error: data.client='site' is for a table (--data table:FILE), not for 'fashion_mnist_small'; leave it out"
    )
    assert refused(*table, "--image-size", "8") == (
        f"error: data.size=8 is for images in files, not for 'table:{people}'; leave it out"
    )
    assert refused(*folder, "--data-dir", "x") == (
        f"error: --data-dir is for sets known by name, not for 'folder:{images}'; leave it out"
    )
    assert refused("--set", "data.test_fraction=0.3") == (
        "error: data.test_fraction is for your own files (folder:DIR, table:FILE or npz:FILE), not for "
        "'fashion_mnist_small'; leave it out"
    )
    assert refused("--set", "data.test_fraction=1") == (
        "error: data.test_fraction=1.0 is out of range; give a share above 0 and below 1"
    )


def test_names_that_are_nearly_right() -> None:
    assert refused("--data", "folder:") == "error: 'folder:' has no path; write folder:DIR"
    assert refused("--data", "foldr:here") == (
        "error: data 'foldr:here' is not known; data of your own are folder:DIR, table:FILE or npz:FILE"
    )
    assert fednorm("data", "info", "table:a.csv").err == (
        "error: 'table:a.csv' is data of your own; look at it with: fednorm data check table:a.csv\n"
    )


def test_models_that_count_on_square_images_say_so(tmp_path: Path) -> None:
    for client in CLIENTS:
        for label in "xy":
            for i in range(4):
                save_image(tmp_path / client / label / f"{i}.png", 10 * i, size=(12, 8))
    assert refused("--data", f"folder:{tmp_path}", "--model", "mlp_bn") == (
        f"error: model 'mlp_bn' takes square images, but 'folder:{tmp_path}' has 12x8; bring them to N x N with "
        "--image-size N, or use --model small_resnet"
    )
    sized = ("--data", f"folder:{tmp_path}", "--image-size", "8", "--model", "mlp_bn(width=4)", *QUICK)
    assert fednorm("run", *sized, "--out", tmp_path / "run").code == 0


def test_tokens_have_no_default_model(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", x=np.arange(40).reshape(10, 4), y=np.arange(10) % 2, client=np.arange(10) // 5)
    assert refused("--data", f"npz:{tmp_path}/t.npz") == (
        f"error: 'npz:{tmp_path}/t.npz' holds tokens of shape (4,), for which there is no default model; name one with "
        "--model package.module:factory"
    )


def test_nothing_is_written_when_data_are_refused(tmp_path: Path) -> None:
    done = fednorm("run", "--data", f"folder:{tmp_path}/none", "--out", tmp_path / "run")
    assert (done.code, (tmp_path / "run").exists()) == (2, False)


# -- a config that was settled --


def test_a_settled_config_stays_as_it_is(people: Path) -> None:
    config = from_dict({"data": {"name": f"table:{people}", "target": "sick"}, "model": "small_resnet"})
    asked = settled_by_files(config, {"model"})
    assert (asked.model, asked.data.partition, asked.data.clients) == ("small_resnet", "shards", 5)
    assert settled_by_files(asked) == asked
    assert settled_by_files(config).model == "mlp_bn"


# -- data check --


def test_a_look_at_a_table(people: Path) -> None:
    lines = check_table(people).out.splitlines()
    assert lines[:2] == [f"table:{people}", "3 clients, 48 training and 12 test examples"]
    table = lines.index("client  train  test  no  yes  label shift  feature shift")
    assert lines[table + 1] == "amber      16     4   8    8         0.04           0.08"
    assert all(len(line) <= 80 for line in lines[1:])


def test_a_look_as_json(images: Path) -> None:
    found = fednorm("data", "check", f"folder:{images}", "--json").json
    assert [entry["name"] for entry in found["clients"]] == list(CLIENTS)
    assert found["clients"][0]["labels"] == [5, 5]
    assert found["inputs"] == {"shape": [1, 16, 16], "type": "uint8", "min": 0, "max": 162}
    assert (found["problems"], found["model"]) == ([], "small_resnet")


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    path = save_table(tmp_path / "a.csv", [("", "X", "u", "no"), (1, "X", "", "yes"), (2, "Y", "v", "")])
    done = fednorm("data", "check", f"table:{path}", "--target", "sick", "--client-column", "site")
    fill = "fill it in, or take the mean with --set data.missing=mean"
    assert done.out.splitlines() == [
        f"problem: '{path}', line 2: column 'age' has no number; {fill}",
        f"problem: '{path}', line 4: the target 'sick' is missing; fill it in or remove the row",
        f"problem: '{path}', line 3: column 'site' names no client; fill it in",
    ]
    assert (done.code, done.err) == (
        2,
        f"error: table:{path} has 3 problems that a run would refuse; they are listed above\n",
    )
    found = fednorm("data", "check", f"table:{path}", "--target", "sick", "--json")
    assert (found.code, len(found.json["problems"])) == (2, 2)


def test_a_look_at_many_clients_of_a_built_in_set() -> None:
    done = fednorm("data", "check", "fashion_mnist_small", "--clients", "25", "--partition", "iid")
    lines = done.out.splitlines()
    assert lines[:2] == ["fashion_mnist_small", "25 clients, 10000 training and 2000 test examples"]
    assert "training examples       400     400     400" in lines
    assert all(len(line) <= 80 for line in lines)


def test_who_holds_what_of_own_data(people: Path, images: Path) -> None:
    shown = fednorm("data", "partition", f"folder:{images}").out.splitlines()
    assert shown == ["client  size  0  1", " amber    10  5  5", " birch    10  5  5", " cedar    10  5  5"]
    dealt = fednorm("data", "partition", f"table:{people}", "--target", "age", "--clients", "3", "--json").json
    assert [entry["size"] for entry in dealt] == [16, 16, 16]
    drawn = fednorm("data", "partition", f"table:{people}", "--target", "age", "--picture", "x.png")
    assert drawn.err == (
        f"error: a picture shows classes, but the task of table:{people} is regression; leave out --picture\n"
    )


def test_clients_are_exported_by_number_or_name(tmp_path: Path, images: Path) -> None:
    small = ("--data", f"folder:{images}", "--model", "mlp_bn(width=4)", *QUICK)
    assert fednorm("run", *small, "--out", tmp_path / "run").code == 0
    assert fednorm("export", tmp_path / "run", "--client", "2").code == 0
    assert fednorm("export", tmp_path / "run", "--client", "bich").err == (
        "error: client 'bich' is not known; did you mean 'birch'?\n"
    )
    assert fednorm("export", tmp_path / "run", "--client", "3").err == (
        "error: client 3 does not exist; the run has clients 0 to 2\n"
    )
