"""A user's own mistake is never a bug of ours: one line, exit code 2, their traceback with --debug, nothing written."""

from __future__ import annotations

import importlib.util
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tiny
from command import fednorm
from fednorm import Part, register, run
from fednorm.cli import exit_code
from fednorm.core.optim import Optimizer
from fednorm.core.optimizers import nesterov_update
from fednorm.core.state import Kind, digest
from fednorm.core.user_code import UserCode, is_users
from fednorm.errors import ConfigError, UserCodeError
from fednorm.methods import known_methods, parse
from fednorm.pieces.changes import add_loss, merge_by
from fednorm.running.trial import try_out

TINY = ("--rounds", "2", "--local-steps", "1", "--set", "data.train_limit=200", "--quiet")
MINE = """
from torch import nn

def raises(num_classes):
    raise ValueError("no such thing\\nas a second line")

def nothing(num_classes):
    return 3

def few(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 3))

def wrong():
    return nn.Sequential(nn.Flatten(), nn.Linear(7, 10))

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.head = nn.Linear(784, num_classes)

    def forward(self, x):
        return self.head(x.flatten(1))

class Breaks(Net):
    def forward(self, x):
        return self.head(x.flatten(0))

class Large(Net):
    def forward(self, x):
        if len(x) > 2 and self.training:
            raise KeyError("large")
        return super().forward(x)

class LargeTest(Net):
    def forward(self, x):
        if len(x) > 2 and not self.training:
            raise RuntimeError("large")
        return super().forward(x)

class Detached(Net):
    def forward(self, x):
        return super().forward(x).detach()

class Pair(Net):
    def forward(self, x):
        return super().forward(x), 3

word = "net"
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with code of a user, and other things that are not what they should be."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "their_models.py").write_text(MINE)
    (folder / "their_syntax.py").write_text("def net(:\n")
    (folder / "their_script.py").write_text("import sys\nsys.exit(3)\n")
    (folder / "file").touch()
    (folder / "folder").mkdir()
    return folder


def torchs_words(x: tuple[int, int], weight: tuple[int, int]) -> str:
    """What this torch says of a linear layer whose input has another size."""
    with pytest.raises(RuntimeError) as found:
        nn.Linear(*weight)(torch.zeros(x))
    return str(found.value)


SEEN_BEFORE = {
    "--model their_models:raises": "model 'their_models:raises' cannot be built: ValueError: no such thing "
    "(their_models.py:5)",
    "--model their_models:nothing": "model 'their_models:nothing' must return a torch.nn.Module; it returned int",
    "--model their_models:few": "model 'their_models:few' has 3 outputs for 10 classes; give it 10, or data with fewer "
    "classes",
    "--model their_models:wrong": "model 'their_models:wrong' failed in its forward pass: RuntimeError: "
    f"{torchs_words((2, 784), (7, 10))}",
    "--model their_models:Breaks": "model 'their_models:Breaks' failed in its forward pass: RuntimeError: "
    f"{torchs_words((1, 1568), (784, 10))} (their_models.py:26)",
    "--model their_models:Detached": "the loss of model 'their_models:Detached' depends on none of its parameters, so "
    "nothing can be learned; look for `detach`, `no_grad` or `.item()` in its forward pass",
    "--model their_models:Pair": "the model (Pair) returns a tuple of 2, of which classification takes one; say which: "
    "fednorm.output(model, 0)",
    "--model their_models:Net(depth=3)": "model 'their_models:Net' has no option 'depth'; its options: none",
    "--model their_models:word": "model 'their_models:word' must be a function or class; it is str",
    "--model their_models:Nett": "in module 'their_models', factory 'Nett' is not known; did you mean 'Net'?",
    "--model their_syntax:net": "model 'their_syntax:net': module 'their_syntax' cannot be imported: SyntaxError: "
    "invalid syntax (their_syntax.py, line 1)",
    "--model their_script:net": "model 'their_script:net': module 'their_script' cannot be imported: SystemExit: 3 "
    "(their_script.py:2)",
    "--init folder": "'folder' is a folder; give a .safetensors file",
    "--config folder": "'folder' cannot be read: Is a directory; give a TOML file",
    "--data cifar10 --data-dir file": "data folder 'file' is a file; give the folder in which the data sets are",
    "--schedule step(at=2)": "schedule 'step(at=2)': at=2 is out of range; give shares of the rounds above 0 and "
    "below 1, ascending, as in at=0.5/0.75",
    "--out file": "'file' cannot be a folder: '{place}/file' is a file; choose another place",
    "--out file/below": "'file/below' cannot be a folder: '{place}/file' is a file; choose another place",
}


@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["run", "dry-run"])
@pytest.mark.parametrize("line", SEEN_BEFORE)
def test_mistakes_seen_before_a_run_starts(
    line: str, dry: tuple[str, ...], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*.*"))
    done = fednorm("run", *TINY, *line.split(), *dry)
    assert done.err == f"error: {SEEN_BEFORE[line].format(place=place)}\n"
    assert (done.code, done.out) == (2, "")
    assert [path for path in sorted(place.rglob("*.*")) if path not in before and path.suffix != ".pyc"] == []
    assert not (place / "runs").exists()


@pytest.mark.parametrize("engine", ["auto", "sequential", "stacked", "workers"])
def test_a_forward_that_fails_later_is_told_with_any_engine(
    engine: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    told = "error: model 'their_models:Large' failed in its forward pass: KeyError: 'large' (their_models.py:31)\n"
    one = ("--set", "engine.workers=1") if engine == "workers" else ()
    asked = ("run", *TINY, "--model", "their_models:Large", "--engine", engine, *one)
    shown = fednorm(*asked, "--out", tmp_path / "a", "--debug")
    assert (shown.code, shown.out) == (2, "")
    assert shown.err.rstrip("\n").endswith(told.rstrip("\n"))
    assert f'File "{place}/their_models.py", line 31, in forward' in shown.err
    assert "bug in fednorm" not in shown.err
    if engine != "workers":
        assert fednorm(*asked, "--out", tmp_path / "b").err == told


def test_a_forward_that_fails_while_scoring(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    done = fednorm("run", *TINY, "--model", "their_models:LargeTest", "--out", tmp_path / "a")
    expected = "model 'their_models:LargeTest' failed in its forward pass: RuntimeError: large (their_models.py:37)"
    assert (done.code, done.err) == (2, f"error: {expected}\n")


@pytest.mark.slow
def test_a_mistake_in_a_process_of_a_comparison(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    asked = ("compare", "fedavg", "fedprox", *TINY, "--model", "their_models:Large", "--jobs", 2)
    monkeypatch.setenv("FEDNORM_DEBUG", "1")
    shown = fednorm(*asked, "--out", tmp_path / "a")
    assert shown.code == 2
    assert f'File "{place}/their_models.py", line 31, in forward' in shown.err
    last = shown.err.splitlines()[-1]
    assert last in {  # whichever came first
        f"error: {method} seed 0: model 'their_models:Large' failed in its forward pass: "
        "KeyError: 'large' (their_models.py:31)"
        for method in ("fedavg", "fedprox")
    }


def test_debug_shows_where_any_error_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, first, last = (
        fednorm(*line)
        for line in (["run", "--lr", "-1"], ["--debug", "run", "--lr", "-1"], ["run", "--lr", "-1", "--debug"])
    )
    assert plain.err == "error: train.lr=-1.0 is out of range; give 0 or more\n"
    for shown in (first, last):
        assert shown.code == 2
        assert shown.err.startswith("Traceback (most recent call last):\n")
        assert shown.err.endswith(
            f"fednorm.errors.ConfigError: train.lr=-1.0 is out of range; give 0 or more\n{plain.err}"
        )
    monkeypatch.setenv("FEDNORM_DEBUG", "0")
    assert fednorm("run", "--lr", "-1").err == plain.err


# -- a dry run refuses what a run refuses --


def test_a_dry_run_refuses_a_folder_that_holds_a_run(tmp_path: Path) -> None:
    out = tmp_path / "a"
    assert fednorm("run", *TINY, "--model", "mlp_bn(width=8)", "--out", out).code == 0
    told = f"error: '{out}' holds a run already; choose another --out, or `fednorm resume {out}`\n"
    for verb in (("run",), ("compare", "fedavg"), ("run", "--seeds", "2")):
        for dry in ((), ("--dry-run",)):
            assert fednorm(*verb, *TINY, "--model", "mlp_bn(width=8)", "--out", out, *dry).err == told


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("compare fedavg fedavg", "method 'fedavg' is given twice; name each once"),
        ("compare fedavg --seeds 1,1", "seed '1' is given twice; name each once"),
        ("run --tensorboard", '--tensorboard needs tensorboard: pip install "fednorm[track]"'),
    ],
)
def test_a_dry_run_refuses_what_cannot_be_played(
    line: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "tensorboard" else real(name))
    for dry in ((), ("--dry-run",)):
        done = fednorm(*line.split(), *TINY, "--model", "mlp_bn(width=8)", *dry)
        assert (done.code, done.err) == (2, f"error: {told}\n")
    assert list(tmp_path.iterdir()) == []


# -- from Python --


class Broken(nn.Module):
    """A network that fails on batches of this size and mode."""

    def __init__(self, size: int, training: bool = True) -> None:
        super().__init__()
        self.inner, self.size, self.fails_in = tiny.conv_net(), size, training

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == self.size and self.training is self.fails_in:
            raise ValueError(f"{self.size} is too many")
        return self.inner(x)


@pytest.mark.parametrize("engine", ["sequential", "stacked", "workers"])
def test_python_gets_the_error_with_its_cause(engine: str) -> None:
    one = {"engine__workers": 1} if engine == "workers" else {}
    with pytest.raises(UserCodeError) as caught:
        run(model=Broken(4), federation=tiny.federation(), config=tiny.config(engine__name=engine, **one))
    line = str(caught.value)
    assert line.startswith(
        "the given Broken failed in its forward pass: ValueError: 4 is too many (test_user_mistakes."
    )
    assert isinstance(caught.value.__cause__, ValueError)
    assert isinstance(caught.value, ConfigError)


def failing_penalty(carry: object, numbers: object) -> Tensor:
    return torch.ones(2) @ torch.ones(3)


class FailingMerge:
    def __call__(self, old: Tensor, clients: Tensor, weights: Tensor, memory: object) -> tuple[Tensor, object]:
        raise IndexError("not today")


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize(
    ("part", "told"),
    [
        (
            add_loss(failing_penalty),
            "'failing_penalty' failed: RuntimeError: inconsistent tensor size, expected tensor",
        ),
        (merge_by(FailingMerge(), Kind.WEIGHT), "'FailingMerge.__call__' failed: IndexError: not today (test_user_mis"),  # type: ignore[arg-type]
    ],
    ids=["penalty", "merge"],
)
def test_a_part_of_a_method_that_fails(engine: str, part: object, told: str) -> None:
    method = replace(part(parse("fedavg")), name="mine")  # type: ignore[operator]
    with pytest.raises(UserCodeError) as caught:
        tiny.play(tiny.plan(method, engine__name=engine))
    assert str(caught.value).startswith(told)


def test_a_part_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fednorm.core.registry._REGISTRY", dict(known_methods()))

    @register("theirs", paper="none", summary="none")
    def theirs(zero: int = 0) -> Part:
        raise ZeroDivisionError(f"1 by {zero}")

    @register("no-part", paper="none", summary="none")
    def no_part() -> Part:
        return "fedavg"  # type: ignore[return-value]

    with pytest.raises(
        UserCodeError, match=r"theirs' failed: ZeroDivisionError: 1 by 0 \(test_user_mistakes.py:\d+\)$"
    ):
        parse("fedprox+theirs")
    with pytest.raises(ConfigError, match=r"^method 'no-part' must return a Part; it returned str$"):
        parse("no-part")


def test_the_trial_shows_whose_mistake_a_failing_layer_of_ours_is() -> None:
    """Surgery made our own convolutions of the user's; they fail only because the images have another channel."""
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3)).double()
    with pytest.raises(
        UserCodeError, match=r"^the given Sequential failed in its forward pass: RuntimeError: Given grou"
    ):
        run(model=model, federation=tiny.federation(), config=tiny.config("fedwon"))


def test_the_trial_changes_nothing() -> None:
    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = tiny.conv_net(), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.inner(x) + torch.rand(1).double() * random.random() * np.random.rand()  # noqa: S311

    made = tiny.plan(model=Drawing())

    def everything() -> list[object]:
        state = digest(dict(made.prepared.model.state_dict()))
        drawn = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index,union-attr]
        return [state, made.prepared.model.calls, made.prepared.model.training, *drawn]

    before = everything()
    try_out(made)
    assert everything() == before


# -- ours --


def test_an_error_of_our_own_code_stays_what_it_is() -> None:
    with pytest.raises(AttributeError, match=r"^'str' object has no attribute 'purpose'$"), UserCode("the model"):
        parse("fedavg").phase_at("nowhere")  # type: ignore[arg-type]


def test_a_bug_of_ours_in_a_step_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # An update without buffers, as if the optimizer's own code were wrong.
    monkeypatch.setattr("fednorm.core.optimizers.MOMENTUM_SGD", Optimizer(nesterov_update, (), "sgd"))
    assert exit_code(["run", *TINY, "--model", "mlp_bn(width=16)", "--out", str(tmp_path / "a")]) == 1
    problem = capsys.readouterr().err.splitlines()
    assert problem[0] == "Traceback (most recent call last):"
    assert problem[-1].startswith("error: this is a bug in fednorm; please report it")


def test_an_error_that_nobody_raised_is_nobodys() -> None:
    assert not is_users(RuntimeError("made, but never raised"))
