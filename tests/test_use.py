"""Own things by name: `--use` files and modules, installed packages, and who must consent before code is run."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fednorm
from command import TINY as USUAL
from command import fednorm as command
from fednorm.core import extending, registry
from fednorm.data import own, partition
from fednorm.errors import ConfigError
from fednorm.methods import known_methods, parse
from fednorm.models.registry import MODELS
from fednorm.running import extensions
from fednorm.running.sealed import sealed

README = (Path(__file__).parents[1] / "README.md").read_text()
OWN_METHOD = next(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "local-affine" in block)
OWN_THINGS = """
import torch
from torch import nn
import fednorm
from beside import CLASSES

@fednorm.register_model("own_net")
def own_net(num_classes, in_channels, width=4):
    "Two layers, as small as can be."
    layers = nn.Linear(12 * in_channels, width), nn.BatchNorm1d(width), nn.Linear(width, num_classes)
    return nn.Sequential(nn.Flatten(), *layers)

@fednorm.register_data("own_set", summary="points")
def own_set(seed, count=60):
    if seed < 0:
        raise ValueError("no points to draw")
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, 3, 4, generator=draw)
    y = torch.arange(count) % CLASSES
    return (x, y), (x[:30], y[:30])

@fednorm.register_data("own_clients")
def own_clients(clients):
    (x, y), test = own_set(0)
    return fednorm.from_clients([(x, y)] * clients, test)

@fednorm.register_partition("halves")
def halves(labels, num_clients, generator, skip=0):
    order = generator.permutation(len(labels))[skip:]
    return [order[c::num_clients] for c in range(num_clients)]
"""
SMALL = ("--rounds", "2", "--local-steps", "1", "--set", "engine.threads=1", "--engine", "sequential")
TINY = (*USUAL, "--engine", "sequential")


REGISTRIES = (registry._REGISTRY, MODELS, own.OWN, partition.PARTITIONS, extensions._loaded)


@pytest.fixture(autouse=True)
def own_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """What is registered and imported here is forgotten afterwards."""
    before = [dict(known) for known in REGISTRIES]
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for known, names in zip(REGISTRIES, before, strict=True):
        known.clear()
        known.update(names)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a user's files, which is where the user is."""
    (tmp_path / "own_method.py").write_text(OWN_METHOD.replace("print(run(", "made = lambda: print(run("))
    (tmp_path / "own_things.py").write_text(OWN_THINGS)
    (tmp_path / "beside.py").write_text("CLASSES = 3\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def forget() -> None:
    """Be as a new process, as far as registered names go."""
    registry._REGISTRY.pop("local-affine", None)
    extensions._loaded.clear()


def test_the_snippet_of_the_readme_works_in_every_verb(folder: Path) -> None:
    use = ("--use", "own_method.py")
    done = command("run", *TINY, *use, "--method", "local-affine", "--out", "a", "--json", "--quiet")
    assert (done.code, done.err) == (0, "")
    stored = json.loads(Path("a/config.json").read_text())
    assert stored["use"] == [str(folder / "own_method.py")]
    assert list(stored["use_sha256"]) == stored["use"]
    forget()
    refused = command("resume", "a")
    assert refused.code == 2
    assert refused.err == (
        f"error: 'a/config.json' names code to run, use '{folder}/own_method.py'; if you trust it, add --allow-code\n"
    )
    assert command("export", "a").err == refused.err
    again = command("resume", "a", "--allow-code", "--json", "--quiet")
    assert again.json["runs"][0]["digest"] == done.json["runs"][0]["digest"]
    forget()
    assert command("export", "a", *use, "--client", "2").out == "a/client-2.safetensors\n"
    forget()
    inspected = command("inspect", "mlp_bn", "--method", "local-affine", *use, "--json")
    policies = {entry["kind"]: entry["policy"] for entry in inspected.json["entries"]}
    assert policies == {"weight": "shared", "affine": "local", "statistic": "shared", "counter": "shared"}
    forget()
    listed = command("methods", *use, "--json")
    assert "local-affine" in [each["name"] for each in listed.json]


def test_models_sets_and_partitions_of_a_file_are_known(folder: Path) -> None:
    use = ("--use", "own_things.py")
    asked = ("--model", "own_net(width=5)", "--data", "own_set", "--partition", "halves(skip=4)", "--clients", "2")
    done = command("run", *use, *asked, *SMALL, "--out", "a", "--json", "--quiet")
    assert (done.code, done.err) == (0, "")
    assert {each["name"]: each["summary"] for each in command("models", *use, "--json").json}["own_net"] == (
        "Two layers, as small as can be"
    )
    assert "own_set" in [each["name"] for each in command("datasets", *use, "--json").json]
    dealt = command("data", "partition", "own_set", *use, "--partition", "halves(skip=4)", "--clients", "2", "--json")
    assert [each["size"] for each in dealt.json] == [28, 28]
    federation = command("data", "partition", "own_clients", *use, "--clients", "3", "--json")
    assert [each["size"] for each in federation.json] == [60, 60, 60]
    assert command("run", *use, "--data", "own_clients", "--partition", "iid").err == (
        "error: data set 'own_clients' comes with its clients; leave out data.partition=iid\n"
    )
    assert command("run", *use, "--data", "own_set(seed=-1,count=word)").err == (
        "error: data set 'own_set' failed: ValueError: no points to draw (own_things.py:16)\n"
    )


@pytest.mark.slow
def test_processes_of_a_comparison_import_it_too(folder: Path) -> None:
    asked = ("--model", "own_net", "--data", "own_set", "--partition", "halves", "--clients", "2", *SMALL)
    use = ("--use", "own_things.py", "--use", "own_method.py")
    one = command("compare", "fedavg", "local-affine", *use, *asked, "--out", "a", "--json", "--quiet")
    two = command("compare", "fedavg", "local-affine", *use, *asked, "--jobs", "2", "--out", "b", "--json", "--quiet")
    assert (one.code, two.code) == (0, 0), two.err
    assert [run["digest"] for run in one.json["runs"]] == [run["digest"] for run in two.json["runs"]]


def test_a_recipe_asks_before_its_files_are_run(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "touching.py").write_text("from pathlib import Path\nPath('touched').touch()\n")
    (folder / "sub" / "recipe.toml").write_text('use = ["touching.py"]\nrounds = 1\n')
    asked = ("run", "--config", "sub/recipe.toml", *TINY, "--rounds", "1", "--quiet", "--out")
    refused = command(*asked, "a")
    assert refused.err == (
        f"error: 'sub/recipe.toml' names code to run, use '{folder}/sub/touching.py'; "
        "if you trust it, add --allow-code\n"
    )
    assert not Path("touched").exists()
    assert command(*asked, "a", "--allow-code").code == 0
    assert Path("touched").exists()
    assert command(*asked, "b", "--use", "sub/touching.py").code == 0


def test_a_cell_of_a_comparison_is_not_believed(folder: Path) -> None:
    assert command("compare", "fedavg", *TINY, "--rounds", "1", "--out", "c", "--quiet").code == 0
    cell = Path("c/fedavg-seed0")
    stored = json.loads((cell / "config.json").read_text())
    forged = sealed({**stored, "model": "subprocess:getoutput(cmd='touch touched')"})
    (cell / "config.json").write_text(json.dumps(forged))
    (cell / "result.json").unlink()
    refused = command("resume", "c")
    assert (refused.code, Path("touched").exists()) == (2, False)
    assert refused.err == (
        "error: 'c/fedavg-seed0' was started with another config: "
        "model was subprocess:getoutput(cmd='touch touched'), is mlp_bn(width=16)\n"
    )
    assert "names code to run, model 'subprocess" in command("resume", cell).err
    assert "names code to run, model 'subprocess" in command("export", cell).err
    with pytest.raises(ConfigError, match="names code to run, model 'subprocess"):
        fednorm.resume(cell)
    assert not Path("touched").exists()


def test_a_file_that_changed_is_named_and_used(folder: Path) -> None:
    use = ("--use", "own_method.py")
    assert command("run", *TINY, *use, "--method", "local-affine", "--out", "a", "--quiet").code == 0
    path = folder / "own_method.py"
    path.write_text(path.read_text().replace("statistics are averaged", "statistics too"))
    done = command("resume", "a", *use, "--quiet")
    assert done.code == 0
    assert done.err == (f"warning: '{path}' has changed since the run was started; from here on the new one is used\n")
    assert known_methods()["local-affine"].summary == "gamma and beta stay on the client, statistics too"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\nimport nothing_of_that_name\n", "line 2: ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        ("x = (\n", "line 1: SyntaxError: '(' was never closed"),
        ("def f():\n    return 1 / 0\n\nf()\n", "line 2: ZeroDivisionError: division by zero"),
        (
            "import fednorm\n@fednorm.register('fedavg')\ndef mine():\n    pass\n",
            "line 2: method 'fedavg' is registered already; choose another name",
        ),
        (
            "import fednorm\n@fednorm.register_model('resnet20')\ndef mine():\n    pass\n",
            "line 2: model 'resnet20' is registered already; choose another name",
        ),
        (
            "import fednorm\n@fednorm.register_data('cifar10')\ndef mine():\n    pass\n",
            "line 2: data set 'cifar10' is registered already; choose another name",
        ),
        (
            "import fednorm\n@fednorm.register_partition('iid')\ndef mine(labels, n, draw):\n    pass\n",
            "line 2: partition 'iid' is registered already; choose another name",
        ),
    ],
)
def test_mistakes_in_a_file_are_told_with_their_line(text: str, said: str, folder: Path) -> None:
    (folder / "wrong.py").write_text(text)
    done = command("methods", "--use", "wrong.py")
    assert (done.code, done.err) == (2, f"error: --use '{folder}/wrong.py', {said}\n")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none.py", "'{}/none.py' cannot be read: No such file or directory; give a Python file or a module"),
        ("no-module", "'no-module' is neither a file nor a module; give FILE.py or package.module"),
        (
            "not_there",
            "'not_there': there is no module of that name; give FILE.py, run in its folder, or install it",
        ),
    ],
)
def test_what_is_not_there_is_named(name: str, said: str, folder: Path) -> None:
    assert command("run", "--use", name).err == f"error: --use {said.format(folder)}\n"


def test_a_module_is_used_by_its_name_and_files_twice(folder: Path) -> None:
    (folder / "copy_of_it.py").write_text((folder / "own_method.py").read_text())
    extensions.load(["own_method", "own_method.py"])  # the same file in two ways
    assert "local-affine" in known_methods()
    with pytest.raises(ConfigError, match="method 'local-affine' is registered already; choose another name"):
        extensions.load(["copy_of_it.py"])


def test_a_file_called_like_a_module_hides_nothing(folder: Path) -> None:
    (folder / "random.py").write_text("import fednorm\nfednorm.register('called-random')(lambda: fednorm.Part(None))\n")
    before = sys.modules["random"]
    extensions.load(["random.py"])
    assert sys.modules["random"] is before
    assert "called-random" in known_methods()


def test_installed_packages_bring_names_and_a_broken_one_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    info = folder / "site" / "brings-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brings\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fednorm]\nbroken = brings_broken\nfine = brings_fine\n")
    (folder / "site" / "brings_broken.py").write_text("raise OSError('no such luck')\n")
    shutil.copy(folder / "own_method.py", folder / "site" / "brings_fine.py")
    monkeypatch.syspath_prepend(folder / "site")
    monkeypatch.setattr(extending, "_looked", [])
    assert parse("local-affine").name == "local-affine"
    assert capsys.readouterr().err == (
        "warning: entry point 'broken' (brings_broken) failed (OSError: no such luck); left out\n"
    )
    assert "local-affine" in known_methods()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("deal", "said"),
    [
        ("[[0, 1]]", "partition 'odd' dealt to 1 clients; expected 2, one array each"),
        ("[[0, 1], [1, 2]]", "partition 'odd' dealt row 1 twice; give each row to one client"),
        ("[[0, 1], [2, 99]]", "partition 'odd' gave client 1 row 99 of 4 examples; expected 0 to 3"),
        ("[[0, 1], [0.5]]", "partition 'odd' gave client 1 no row numbers; expected an array of them"),
        (
            "[[0, 1], []]",
            "partition 'odd' leaves client 1 with 0 examples, fewer than min_size 1; change what it deals",
        ),
    ],
)
def test_a_partition_that_deals_wrongly_is_refused(deal: str, said: str, folder: Path) -> None:
    (folder / "odd.py").write_text(
        f"import fednorm\n@fednorm.register_partition('odd')\ndef odd(labels, num_clients, generator):\n"
        f"    return {deal}\n"
    )
    extensions.load(["odd.py"])
    with pytest.raises(ConfigError) as refusal:
        partition.partition("odd", [0, 0, 1, 1], 2, seed=0)
    assert str(refusal.value) == said


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("7", "returned int; return a Federation, an ImageSet, or ((train_x, train_y), (test_x, test_y))"),
        (
            "([[0.5]], [0.5]), ([[0.5]], [0.5])",
            "has labels of type torch.float32; a set that is to be dealt needs whole numbers from 0, "
            "one for each example",
        ),
    ],
)
def test_a_set_that_is_none_is_refused(made: str, said: str, folder: Path) -> None:
    (folder / "odd.py").write_text(f"import fednorm\n@fednorm.register_data('odd')\ndef odd():\n    return {made}\n")
    done = command("run", "--use", "odd.py", "--data", "odd")
    assert done.err == f"error: data set 'odd' {said}\n"
    assert command("run", "--use", "odd.py", "--data", "odd(size=3)").err == (
        "error: data set 'odd' has no option 'size'; its options: none\n"
    )
    assert command("run", "--use", "odd.py", "--data", "od").err.startswith(
        "error: data set 'od' is not known; did you mean 'odd'?"
    )
