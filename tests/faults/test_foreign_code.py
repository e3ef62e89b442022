"""Files and folders of others run no code: every attempt leaves its mark unmade, and one line says why."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
import tomllib
import types
import zipfile
from collections.abc import Callable
from contextlib import closing
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import tiny
from command import ONE_THREAD, TINY, fednorm
from fednorm.data import load_dataset
from fednorm.data.from_files.npz import read_arrays
from fednorm.data.from_files.table_file import read_table_file
from fednorm.errors import CheckpointError, ConfigError
from fednorm.models import build, zoo
from fednorm.running.config import RunConfig, updated
from fednorm.running.consent import named_code
from fednorm.running.plan import make_plan
from fednorm.running.recipe import read_recipe
from fednorm.running.store import Store
from fednorm.running.tensor_files import load_tree

SHELL = "subprocess:getoutput(cmd='touch touched')"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that somebody sent, which is where the user is; no attack makes the file `touched` in it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(work: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        work()
    return str(caught.value)


def test_a_plan_denies_code_whoever_asks_for_it(here: Path) -> None:
    (here / "own.py").write_text("from pathlib import Path\nPath('touched').touch()\n")
    for config, named in [
        (tiny.config(model=SHELL), f"model '{SHELL}'"),
        (tiny.config(use=("own.py",)), f"use '{here}/own.py'"),
    ]:
        assert refusal(lambda config=config: make_plan(config, federation=tiny.federation())) == (
            f"the config names code to run, {named}, and nobody consented; "
            "if you trust it, pass code=named_code(config)"
        )
        assert named_code(config) == [named]
    other = named_code(tiny.config(model="package.module:factory"))
    assert "nobody consented" in refusal(lambda: make_plan(tiny.config(model=SHELL), code=other))
    assert not (here / "touched").exists()
    config = tiny.config(use=("own.py",))
    make_plan(config, model=tiny.residual_net(), federation=tiny.federation(), code=named_code(config))
    assert (here / "touched").exists()


def test_a_forged_state_does_not_bring_a_model_of_its_own(here: Path) -> None:
    """A longer run is compared with the one that was started, whose config lies in its state."""
    assert fednorm("run", *TINY, "--engine", "sequential", "--out", "a", "--quiet").code == 0
    with closing(Store(here / "a" / "state.sqlite")) as store:
        facts = store.facts()
        store.commit(facts["round"], {}, {"config": {**facts["config"], "model": SHELL}}, [])
    done = fednorm("resume", "a", "--rounds", "5")
    assert (done.code, done.err) == (
        2,
        f"error: the config names code to run, model '{SHELL}', and nobody consented; "
        "if you trust it, pass code=named_code(config)\n",
    )
    assert not (here / "touched").exists()


@pytest.mark.parametrize(
    ("model", "option"),
    [
        ("timm:resnet18", "checkpoint_path"),
        ("timm:resnet18", "pretrained"),
        ("timm:resnet18", "pretrained_cfg"),
        ("timm:resnet18", "cache_dir"),
        ("torchvision:resnet18", "weights"),
        ("torchvision:resnet18", "weights_backbone"),
    ],
)
def test_options_of_libraries_that_read_files_are_not_passed_on(model: str, option: str) -> None:
    known = zoo._TIMM_OPTIONS if model.startswith("timm") else zoo._TORCHVISION_OPTIONS
    assert refusal(lambda: build(model, **{option: "evil.pth"})) == (
        f"model '{model}': option '{option}' is not passed on, since it could read files or fetch them; "
        f"known: {', '.join(sorted(known))}. For others write a factory, package.module:factory"
    )


def test_a_recipe_with_such_an_option_is_one_line(here: Path) -> None:
    (here / "recipe.toml").write_text('model = "timm:resnet18(checkpoint_path=evil.pth)"\n')
    done = fednorm("run", "--config", "recipe.toml", "--out", "a")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert done.err.startswith("error: model 'timm:resnet18': option 'checkpoint_path' is not passed on")
    assert [path.name for path in here.iterdir()] == ["recipe.toml"]


def test_a_timm_that_unpickles_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    old = types.ModuleType("timm")
    old.__version__ = "1.0.9"  # type: ignore[attr-defined]
    old.__spec__ = ModuleSpec("timm", None, origin="timm/__init__.py")
    monkeypatch.setitem(sys.modules, "timm", old)
    assert refusal(lambda: build("timm:resnet18")) == (
        "model 'timm:resnet18': timm 1.0.9 may run code out of a checkpoint, 1.0.26 does not; "
        'pip install "timm>=1.0.26"'
    )
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    oldest = ".".join(map(str, zoo.OLDEST_TIMM))
    assert f"timm>={oldest}" in project["project"]["optional-dependencies"]["zoo"]


TRAPS = ("torchvision", "timm", "typer", "rich", "matplotlib", "json", "multiprocessing", "pickle", "PIL", "scipy")


@pytest.mark.slow
def test_no_verb_imports_what_lies_in_the_folder_one_is_in(here: Path) -> None:
    for name in TRAPS:
        (here / f"{name}.py").write_text(f"open({str(here / 'touched')!r}, 'w').close()\n")
    workers = ("run", *TINY, "--engine", "workers", "--set", "engine.workers=1", "--out", "a", "--quiet")
    for verb in (("doctor", "--json"), workers):
        command = [sys.executable, "-m", "fednorm", *verb]
        done = subprocess.run(command, cwd=here, env=ONE_THREAD, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in here.iterdir()) == sorted([*(f"{name}.py" for name in TRAPS), "a"])


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n(touched) (w) file closefile\nshowpage\n"
FORMATS = "it is not a readable image (none of JPEG, PNG, BMP, WEBP, PPM, GIF, TIFF)"


def test_postscript_called_png_never_reaches_ghostscript(here: Path) -> None:
    for domain in ("art_painting", "cartoon", "photo", "sketch"):
        (here / "PACS" / domain / "dog").mkdir(parents=True)
        (here / "PACS" / domain / "dog" / "a.png").write_bytes(POSTSCRIPT)
    first = here / "PACS" / "art_painting" / "dog" / "a.png"
    assert refusal(lambda: load_dataset("pacs", here)) == f"{first} is damaged: {FORMATS}; delete it and get it again"
    done = fednorm("data", "check", f"folder:{here / 'PACS'}")
    assert f"problem: '{first}' {FORMATS.removeprefix('it ')}; remove it\n" in done.out
    assert (done.code, (here / "touched").exists()) == (2, False)
    pieces = np.frombuffer(POSTSCRIPT, np.uint8)
    labels, edges = np.zeros(1, np.int64), np.array([0, len(pieces)])
    split = {"train_blob": pieces, "train_off": edges, "y_train": labels}
    np.savez(here / "svhn.npz", **split, **{name.replace("train", "test"): array for name, array in split.items()})
    assert refusal(lambda: load_dataset("svhn", here)) == (
        f"{here} is damaged: an image in {FORMATS}; delete it and get it again"
    )


class Touching:
    """Makes the file when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.system, ("touch touched",)


def evil(kind: str) -> bytes:
    """A file that runs a command where it is opened by who trusts it."""
    pickled = pickle.dumps(Touching())
    buffer = io.BytesIO()
    if kind == "pickle":
        return pickled
    if kind == "torch":
        torch.save(Touching(), buffer)
    elif kind == "torch, old form":
        torch.save(Touching(), buffer, _use_new_zipfile_serialization=False)
    elif kind == "npy":
        np.save(buffer, np.array([Touching()]), allow_pickle=True)
    elif kind == "npz":
        np.savez(buffer, x=np.array([Touching()]), y=np.zeros(1, np.int64))
    elif kind == "zip":
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("archive/data.pkl", pickled)
            archive.writestr("x.npy", pickled)
    return buffer.getvalue()


READERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "init": (load_tree, r"^'.*file' is not a safetensors file \(.*\); pickle files are never read$"),
    "npz": (read_arrays, r"is not a readable \.npz file|holds Python objects, which are never read|has no array x"),
    "table": (lambda file: read_table_file(file, file), "is not UTF-8 text|is not a readable CSV|has no rows|cells"),
    "recipe": (read_recipe, "is not TOML"),
}


@pytest.mark.fault(row=24)
@pytest.mark.parametrize("kind", ["pickle", "torch", "torch, old form", "npy", "npz", "zip"])
@pytest.mark.parametrize("reader", READERS)
def test_pickles_in_every_dress_are_never_opened(here: Path, reader: str, kind: str) -> None:
    read, said = READERS[reader]
    (here / "file").write_bytes(evil(kind))
    with pytest.raises((ConfigError, CheckpointError), match=said):
        read(here / "file")
    assert [path.name for path in here.iterdir()] == ["file"]


@pytest.mark.fault(row=24)
def test_pickles_in_a_folder_of_a_run_are_never_opened(here: Path) -> None:
    (here / "run").mkdir()
    config, state = here / "run" / "config.json", here / "run" / "state.sqlite"
    config.write_bytes(evil("pickle"))
    assert fednorm("resume", "run").err.startswith("error: 'run/config.json' is damaged (")
    config.write_text(json.dumps({"given": [], "model": "mlp_bn", "data": {"train_limit": 200}}))
    state.write_bytes(evil("torch"))
    said = "error: run/state.sqlite is not usable as the state of a run: file is not a database\n"
    assert [fednorm(verb, "run").err for verb in ("resume", "export")] == [said, said]
    assert not (here / "touched").exists()


def test_the_attacks_would_work_on_who_trusts_them(here: Path) -> None:
    pickle.loads(evil("pickle"))  # noqa: S301
    assert (here / "touched").exists()
    with Image.open(io.BytesIO(POSTSCRIPT)) as image:
        assert image.format == "EPS"


def test_consent_is_to_names(here: Path) -> None:
    asked = updated(RunConfig(), {"model": "package.module:factory", "use": ("own.py",)})
    assert named_code(asked) == ["model 'package.module:factory'", f"use '{here}/own.py'"]
    assert named_code(asked, trusted=["own.py"]) == ["model 'package.module:factory'"]
