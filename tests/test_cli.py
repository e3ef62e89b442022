"""The command line: what it lists, what it refuses and with which words, and that help is quick."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from command import TINY, fednorm
from fednorm.cli import exit_code
from fednorm.cli.flags import FLAGS, field_help
from fednorm.cli.settings import resolve
from fednorm.errors import ConfigError
from fednorm.running.config import all_fields, to_dict
from fednorm.running.recipe import read_recipe, to_toml


def test_help_does_not_import_torch() -> None:
    code = "import sys; from fednorm.cli import exit_code; exit_code(['run', '--help']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    assert "--clients-per-round" in done.stdout


def test_python_m_fednorm_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "fednorm", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == "0.1.0\n"


def test_every_flag_has_the_help_of_its_field() -> None:
    assert set(field_help()) == set(all_fields())
    shown = fednorm("run", "--help").out
    for flag in FLAGS:
        assert flag.option in shown


# -- bad input: one line that names the value, what was expected and how to fix it --

REFUSED = {
    "run --method fedbm": "method 'fedbm' is not known; did you mean 'fedb",
    "run --method fixbn+fedbn": "'fixbn' and 'fedbn' cannot be combined: both decide the policy of counter; keep one",
    "run --method fedprox(nu=1)": "option of 'fedprox' 'nu' is not known; did you mean 'mu'?",
    "run --model resnet81": "model 'resnet81' is not known; did you mean 'resnet18'? (`fednorm models` lists all",
    "run --model nosuch:thing": "there is no module 'nosuch'; run in its folder or put that on PYTHONPATH",
    "run --partition shardz": "partition 'shardz' is not known; did you mean 'shards'?",
    "run --clients 30 --set data.train_limit=20": "30 clients cannot share 20 examples; use at most 20 clients",
    "run --partition shards(classes_per_client=11)": "partition 'shards': classes_per_client must be 1 to 10",
    "run --partition dir_client(alpha=0.1) --set data.min_size=5000": "leaves client 0 with 2000 examples, fewer than "
    "min_size 5000; use fewer clients",
    "run --batch-size 1": "train.batch_size=1 cannot train BatchNorm, which needs statistics of at least 2 examples; "
    "use a larger batch, or a method without batch statistics such as fedavg+gn",
    "run --data cifar11": "data set 'cifar11' is not known; did you mean 'cifar1",
    "run --data cifar10 --data-dir /no/where": "cifar10 was not found in /no/where; expected /no/where/cifar-10-",
    "run --lr fast": "train.lr='fast' does not fit; give float",
    "run --lr -1": "train.lr=-1.0 is out of range; give 0 or more",
    "run --rounds 1.5": "rounds=1.5 does not fit; give int",
    "run --set train.l=3": "config field 'train.l' is not known; did you mean 'train.lr'?",
    "run --set train.lr": "--set train.lr has no value; write --set FIELD=VALUE, such as --set train.lr=0.1",
    "run --seeds many": "--seeds many cannot be read; give a number of seeds, or a list such as 0,1,2",
    "run --local-steps 1 --local-epochs 1": "local_steps=1 and local_epochs=1 exclude each other; give one",
    "run --clients 3 --clients-per-round 9": "clients_per_round=9 but only 3 clients train; give at most that many",
    "run --jobs 0": "--jobs 0 is out of range; give 1 or more",
    "run --engine warp": "engine.name='warp' does not fit; give '",
    "run --device tpu": "device 'tpu' is not known; give auto, cpu, cuda, cuda:1 or mps",
    "run --init /no/where": "'/no/where' does not exist; give a .safetensors file",
    "run --config /no/where.toml": "'/no/where.toml' does not exist; give a TOML file with fields of the config",
    "run --bogus": "(see `fednorm run --help`)",
    "compare": "nothing to compare; name methods, such as: fednorm compare fedavg fixbn",
    "compare fedavg fedavg": "method 'fedavg' is given twice; name each once",
    "resume /no/where": "'/no/where' is not the folder of a run: it has no config.json",
    "export /no/where": "'/no/where' is not the folder of a run: it has no config.json",
    "inspect simple_cnn --method fedbn": "'fedbn' finds no BatchNorm layer to act on in model 'simple_cnn' and would "
    "equal 'fedavg'; use 'fedavg', another model, or --allow-noop to run it all the same",
    "inspect": "Missing argument 'MODEL' (see `fednorm inspect --help`)",
    "data verify cifar11": "data set 'cifar11' is not known; did you mean 'cifar1",
    "dance": "No such command 'dance' (see `fednorm --help`)",
}


@pytest.mark.parametrize("line", REFUSED)
def test_bad_input_gets_one_line_and_exit_code_2(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = fednorm(*line.split())
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert REFUSED[line] in done.err
    assert list(tmp_path.iterdir()) == [], "nothing may be half-written"


def test_a_missing_data_folder_says_how_to_get_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDNORM_DATA", raising=False)
    expected = "error: cifar10 needs a data folder: give --data-dir DIR or set FEDNORM_DATA; get it with: "
    assert fednorm("run", "--data", "cifar10").err == expected + "fednorm data fetch cifar10 --data-dir DIR\n"


def test_a_bug_leaves_a_traceback_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fednorm.data.registry.DATASETS", None)
    assert exit_code(["datasets"]) == 1
    problem = capsys.readouterr().err.splitlines()
    assert problem[0].startswith("Traceback")
    assert problem[-1].startswith("error: this is a bug in fednorm; please report it")


# -- settings: defaults < TOML < --set < flags --


def test_order_of_precedence(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text("rounds = 7\n[train]\nlr = 0.3\nmomentum = 0.5\nbatch_size = 5\n")
    config, _ = resolve(
        file=file,
        assignments=["train.lr=0.2", "train.momentum=0.4"],
        flags={"train.momentum": "0.1"},
        allow_code=False,
    )
    chosen = (config.rounds, config.train.batch_size, config.train.lr, config.train.momentum, config.seed)
    assert chosen == (7, 5, 0.2, 0.1, 0)


def test_local_epochs_on_the_command_line_replace_the_steps_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text("[train]\nlocal_steps = 3\n")
    config, _ = resolve(file=file, assignments=[], flags={"train.local_epochs": "2"}, allow_code=False)
    assert config.local_work() == ("epochs", 2)


def test_code_in_a_file_runs_only_if_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "traitor.py").write_text("from pathlib import Path\nPath('touched').touch()\n")
    (tmp_path / "recipe.toml").write_text('model = "traitor:net"\n')
    refused = fednorm("run", "--config", "recipe.toml")
    assert refused.code == 2
    assert refused.err == (
        "error: 'recipe.toml' names code to run, model 'traitor:net'; if you trust it, add --allow-code\n"
    )
    assert not (tmp_path / "touched").exists()
    allowed = fednorm("run", "--config", "recipe.toml", "--allow-code")
    assert allowed.err.startswith("error: in module 'traitor', factory 'net' is not known")
    assert (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rounds = ", "is not TOML: "),
        ("rouns = 3", "config field 'rouns' is not known; did you mean 'rounds'?"),
        ("train = 3", "train=3 is not a table; write [train] with its fields below"),
        ("[compare]\nmethods = 3", 'compare.methods=3 does not fit; write methods = ["fedavg", "fixbn"]'),
        ("[compare]\nmethod = 3", "recipe field 'compare.method' is not known; did you mean 'compare.methods'?"),
    ],
)
def test_bad_recipes_are_refused(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(text)
    done = fednorm("run", "--config", file)
    assert (done.code, problem in done.err) == (2, True), done.err


def test_the_printed_config_is_a_recipe_for_the_same_run(tmp_path: Path) -> None:
    config, _ = resolve(
        file=None, assignments=["eval.probes=grad-norm"], flags={"train.local_steps": "3"}, allow_code=False
    )
    file = tmp_path / "again.toml"
    file.write_text(to_toml(to_dict(config)))
    again, _ = resolve(file=file, assignments=[], flags={}, allow_code=False)
    assert again == config
    assert read_recipe(file).methods == ()


@given(st.sampled_from(all_fields()), st.text(max_size=8))
def test_any_text_for_any_field_is_taken_or_refused_by_name(name: str, text: str) -> None:
    try:
        resolve(file=None, assignments=[], flags={name: text}, allow_code=True)
    except ConfigError as refusal:
        problem = str(refusal)
    else:
        return
    assert name.rpartition(".")[2] in problem


# -- listings --


def test_methods_as_json() -> None:
    found = {each["name"]: each for each in fednorm("methods", "--json").json}
    assert {"centralized", "standalone", "fedavg", "fedprox", "fedbn", "silobn", "fixbn", "gn"} <= set(found)
    assert all({"name", "paper", "summary", "needs", "options", "policies"} <= set(each) for each in found.values())
    assert found["fedbn"]["needs"] == ["client_state"]
    assert found["fedbn"]["policies"]["affine"] == "local"
    assert found["fixbn"]["policies"]["statistic"] == "shared -> frozen"
    assert found["fedprox"]["options"]["mu"] == 0.01
    assert found["fedbn"]["local"] == ["affine", "statistic", "counter"]
    assert found["standalone"]["bytes_percent"] == [0.0]
    assert found["fedtan"]["exchanges"] == [58]


def test_one_method_in_full() -> None:
    told = fednorm("methods", "fixbn(at=0.25)+fedprox(mu=0.5)", "--json").json
    assert (told["switch"], told["stages"][0]["phases"][0]["numbers"]) == ("after (at=0.25)", {"prox.mu": 0.5})
    shown = fednorm("methods", "hbn").out
    assert "surgery: to hybrid BN" in shown
    assert "before every test, query" in shown
    assert "recorded moments (ema=0.002, first=0.002): statistic" in shown
    refused = fednorm("methods", "fixbm")
    assert (refused.code, "did you mean 'fixbn'" in refused.err) == (2, True)


def test_models_and_datasets_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDNORM_DATA", raising=False)
    models = {each["name"]: each for each in fednorm("models", "--json").json}
    assert models["resnet20"]["parameters"] == 269_722
    assert models["deeplabv3plus"]["task"] == "segmentation"
    sets = {each["name"]: each for each in fednorm("datasets", "--json").json}
    assert sets["fashion_mnist_small"]["here"] is True
    assert sets["cifar10"]["here"] is False
    assert fednorm("data", "info", "fashion_mnist_small", "--json").json["licence"] == "MIT"


def test_listings_for_people_name_everything() -> None:
    for verb in ("methods", "models", "datasets"):
        shown = fednorm(verb).out
        assert all(each["name"] in shown for each in fednorm(verb, "--json").json)


def test_a_partition_can_be_looked_at_before_training(tmp_path: Path) -> None:
    picture = tmp_path / "who.png"
    deal = ("data", "partition", "fashion_mnist_small", "--partition", "shards", "--clients", "5", "--picture", picture)
    entries = fednorm(*deal, "--json").json
    assert [entry["size"] for entry in entries] == [2000] * 5
    assert sorted(label for entry in entries for label in entry["classes"]) == list(range(10))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert fednorm(*deal).out.splitlines()[0].split()[:2] == ["client", "size"]
    refused = fednorm("data", "partition", "fashion_mnist_small", "--partition", "domain")
    assert refused.code == 2
    assert refused.err.startswith("error: partition 'domain' needs a data set with domains")


def test_inspect_knows_downsample_layers_by_their_type() -> None:
    found = fednorm("inspect", "resnet18", "--method", "fedbn", "--json").json
    local = [entry for entry in found["entries"] if entry["policy"] == "local"]
    assert len(local) == 100, "20 batch norms of 5 entries each"
    assert "layer2.0.downsample.1.weight" in {entry["key"] for entry in local}
    totals = found["totals"]
    assert totals["by_policy"]["local"] == {"entries": 100, "bytes": sum(entry["bytes"] for entry in local)}
    assert totals["up_per_round"] == totals["bytes"] - totals["by_policy"]["local"]["bytes"]


def test_inspect_shows_how_policies_change() -> None:
    shown = fednorm("inspect", "small_resnet", "--method", "fixbn").out
    assert "shared -> frozen" in shown
    assert "each client, stage 2, train: up " in shown
    assert "stages: 2, the second after (at=0.5)" in shown


def test_inspect_tells_the_query_and_what_a_method_is_made_of() -> None:
    found = fednorm("inspect", "small_resnet", "--method", "sbn", "--json").json
    assert [line["stage"] for line in found["totals"]["exchanges"]] == [1, "query"]
    assert found["totals"]["exchanges"][1]["up"] == found["details"]["query"]["bytes_up"] > 0
    assert found["details"]["surgery"] == ["to static BN"]
    shown = fednorm("inspect", "small_resnet", "--method", "sbn").out
    assert "each client, before every test, statistics: up " in shown


def test_inspect_takes_own_code_and_tells_what_surgery_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from torch import nn\ndef net(num_classes):\n    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), "
        "nn.Flatten(), nn.Linear(4, num_classes))\n"
    )
    found = fednorm("inspect", "mine:net", "--method", "fedavg+gn", "--num-classes", 7, "--json").json
    assert [entry["kind"] for entry in found["entries"]][:4] == ["weight", "weight", "affine", "affine"]
    assert found["entries"][-1]["shape"] == [7]
    assert found["notes"]


def test_dry_run_prints_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = fednorm("run", "--method", "fixbn", *TINY, "--dry-run", "--json")
    found = done.json["methods"]["fixbn"]
    assert found["config"]["rounds"] == 3
    assert [client["size"] for client in found["clients"]] == [40] * 5
    assert found["estimate"]["steps_per_round"] == 5
    assert done.json["estimated_seconds"] > 0
    played = fednorm("run", "--method", "fixbn", *TINY, "--out", "real", "--json").json["runs"][0]
    first, second = found["bytes_per_client"]
    rounds = [first, second, second]  # the switch comes at half of three rounds
    assert played["bytes"]["up"] == 5 * sum(each["up"] for each in rounds)
    assert played["bytes"]["down"] == 5 * sum(each["down"] for each in rounds)
    shown = fednorm("compare", "fedavg", "standalone", *TINY, "--dry-run").out
    assert "standalone, stage 1, train: each of 5 clients sends 0 B and receives 0 B a round" in shown
    assert "nothing was written" in shown
    assert [path.name for path in tmp_path.iterdir()] == ["real"]


def test_doctor_as_json() -> None:
    found = fednorm("doctor", "--json").json
    assert found["torch"] == torch.__version__
    assert found["extras"]["data"]["pillow"]
    assert "fashion_mnist_small" in found["datasets"]
    assert found["seconds_per_round"] > 0
    assert json.dumps(found)
