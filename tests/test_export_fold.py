"""`fednorm export --fold`: the same outputs from plain layers, and a file that says what it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from command import Outcome, fednorm
from fednorm import models
from fednorm.export import export
from fednorm.layers.ws_conv import WSConv2d
from fednorm.pieces.fold import fold
from fednorm.prepare import prepare
from fednorm.registry import parse
from fednorm.state import is_norm


def run(method: str, folder: Path, *more: str) -> Path:
    """A short run of a small residual network on the embedded images."""
    settings = ("data.train_limit=100", "engine.threads=1", "eval.every=3", "train.batch_size=8")
    sets = [word for setting in settings for word in ("--set", setting)]
    done = fednorm("run", "--method", method, "--rounds", 3, "--local-steps", 2, *sets, *more, "--out", folder)
    assert done.code == 0, done.err
    return folder


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()


def network(method: str) -> nn.Module:
    return prepare(models.build("small_resnet", in_channels=1), parse(method)).model


def both(folder: Path, method: str, *flags: object) -> tuple[nn.Module, nn.Module, Path]:
    """The exported network as it trained, the folded one, and the folded one's file."""
    usual, plain = network(method), fold(network(method))
    for net, name, more in ((usual, "usual", ()), (plain, "folded", ("--fold",))):
        done = fednorm("export", folder, *flags, *more, "-o", folder / f"{name}.safetensors")
        assert done == Outcome(0, f"{folder / name}.safetensors\n", "")
        net.load_state_dict(load_file(folder / f"{name}.safetensors"))
    return usual.eval(), plain.eval(), folder / "folded.safetensors"


def largest_gap(usual: nn.Module, plain: nn.Module) -> float:
    torch.manual_seed(0)
    x = torch.randn(8, 1, 28, 28)
    with torch.no_grad():
        outputs = usual(x)
        assert outputs.std() > 1e-3
        return float((plain(x) - outputs).abs().max())


@pytest.mark.parametrize(
    ("method", "flags", "said"),
    [
        ("fedavg", (), "9 BatchNorm layers folded into the layer before"),
        ("fedbn", ("--client", 2), "9 BatchNorm layers folded into the layer before"),
        ("fedwon", (), "9 standardised convolutions became plain"),
    ],
)
def test_a_folded_model_computes_the_same(method: str, flags: tuple[object, ...], said: str, tmp_path: Path) -> None:
    usual, plain, file = both(run(method, tmp_path / "run"), method, *flags)
    assert largest_gap(usual, plain) <= 1e-5
    assert not any(is_norm(module) or isinstance(module, WSConv2d) for module in plain.modules())
    facts = metadata(file)
    assert (facts["folded"], facts["fold"], facts["norms_left"]) == ("true", said, "none")
    assert facts["client"] == (str(flags[1]) if flags else "global")
    assert metadata(file.with_name("usual.safetensors"))["folded"] == "false"


def test_norms_that_stay_are_named(tmp_path: Path) -> None:
    usual, plain, file = both(run("ws+gn", tmp_path / "run"), "ws+gn")
    assert largest_gap(usual, plain) <= 1e-5
    left = metadata(file)["norms_left"].split(", ")
    assert left == [name for name, module in usual.named_modules() if isinstance(module, nn.GroupNorm)]
    assert len(left) == 9


def test_nothing_to_fold_is_refused(tmp_path: Path) -> None:
    folder = run("gn", tmp_path / "run")
    done = fednorm("export", folder, "--fold")
    assert (done.code, done.err) == (
        2,
        "error: 'small_resnet' with 'gn' cannot be folded: it has no BatchNorm and no standardised convolution; "
        "leave out --fold\n",
    )
    assert not list(folder.glob("*folded*"))


def test_queried_statistics_are_exported_and_folded(tmp_path: Path) -> None:
    folder = run("sbn", tmp_path / "run")
    usual = load_file(export(folder))
    final = load_file(folder / "model.safetensors")
    assert usual.keys() == final.keys()
    assert all(torch.equal(usual[key], final[key]) for key in final)
    trained = network("sbn")
    trained.load_state_dict(usual)
    plain = fold(trained)  # static norms fold once a query has filled them
    plain.load_state_dict(load_file(export(folder, fold=True)))
    assert (folder / "global-folded.safetensors").exists()
    assert largest_gap(trained.eval(), plain.eval()) <= 1e-5
