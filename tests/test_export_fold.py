"""`fednorm export --fold`: the same outputs from plain layers, and a file that says what it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import fednorm
from command import TINY
from command import fednorm as command_line
from fednorm import models
from fednorm.core.state import is_norm
from fednorm.data.federation import Federation
from fednorm.data.given import from_clients
from fednorm.errors import ConfigError
from fednorm.halves.prepared import prepare
from fednorm.layers.ws_conv import WSConv2d
from fednorm.methods import parse
from fednorm.pieces.fold import fold
from fednorm.views.export import export


def federation() -> Federation:
    """Three clients with a few images each, brighter from client to client."""
    torch.manual_seed(0)
    parts = [(torch.randn(6, 1, 16, 16) * (1 + client) + client, torch.arange(6) % 4) for client in range(3)]
    return from_clients(parts, parts, num_classes=4)


DATA = federation()


def run(method: str, folder: Path) -> Path:
    """A short run of a small residual network."""
    settings = {"rounds": 3, "local_steps": 2, "batch_size": 4, "device": "cpu", "lr": 0.1}
    fednorm.run(method=method, federation=DATA, out=folder, **settings)
    return folder


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()


def exported(folder: Path, method: str, client: int | None = None) -> tuple[nn.Module, nn.Module, dict[str, str]]:
    """The exported network as it trained, the folded one, and what the folded one's file says."""
    usual = prepare(models.build("small_resnet", in_channels=1, num_classes=4), parse(method)).model
    usual.load_state_dict(load_file(export(folder, client=client, federation=DATA)))
    file = export(folder, client=client, federation=DATA, fold=True)
    plain = fold(usual)
    for parameter in plain.parameters():
        nn.init.zeros_(parameter)  # what it computes comes from the file
    plain.load_state_dict(load_file(file))
    return usual.eval(), plain.eval(), metadata(file)


@torch.no_grad()
def largest_gap(usual: nn.Module, plain: nn.Module, *shape: int) -> float:
    torch.manual_seed(0)
    x = torch.randn(8, *(shape or (1, 16, 16)))
    outputs = usual(x)
    assert outputs.std() > 1e-2
    return float((plain(x) - outputs).abs().max())


@pytest.mark.parametrize(
    ("method", "client", "said"),
    [
        ("fedavg", None, "9 BatchNorm layers folded into the layer before"),
        ("fedbn", 2, "9 BatchNorm layers folded into the layer before"),
        ("fedwon", None, "9 standardised convolutions became plain"),
        ("sbn", None, "9 BatchNorm layers folded into the layer before"),
    ],
)
def test_a_folded_model_computes_the_same(method: str, client: int | None, said: str, tmp_path: Path) -> None:
    usual, plain, facts = exported(run(method, tmp_path / "run"), method, client)
    assert largest_gap(usual, plain) <= 1e-5
    assert not any(is_norm(module) or isinstance(module, WSConv2d) for module in plain.modules())
    assert (facts["folded"], facts["fold"], facts["norms_left"]) == ("true", said, "none")
    assert (facts["method"], facts["client"]) == (method, "global" if client is None else str(client))


def test_norms_that_stay_are_named(tmp_path: Path) -> None:
    usual, plain, facts = exported(run("ws+gn", tmp_path / "run"), "ws+gn")
    assert largest_gap(usual, plain) <= 1e-5
    norms = [name for name, module in usual.named_modules() if isinstance(module, nn.GroupNorm)]
    assert (len(norms), facts["norms_left"]) == (9, ", ".join(norms))
    assert facts["fold"] == "9 standardised convolutions became plain"


def test_queried_statistics_are_exported(tmp_path: Path) -> None:
    folder = run("sbn", tmp_path / "run")
    usual, final = load_file(export(folder, federation=DATA)), load_file(folder / "model.safetensors")
    assert usual.keys() == final.keys()
    assert all(torch.equal(usual[key], final[key]) for key in final)


def test_nothing_to_fold_is_refused(tmp_path: Path) -> None:
    folder = run("gn", tmp_path / "run")
    with pytest.raises(ConfigError) as refusal:
        export(folder, fold=True, federation=DATA)
    assert str(refusal.value) == (
        "'small_resnet' with 'gn' cannot be folded: it has no BatchNorm and no standardised convolution; "
        "leave out --fold"
    )
    assert not list(folder.glob("*folded*"))


def test_the_command_folds_a_clients_model_of_vectors(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert command_line("run", "--method", "fedbn", *TINY, "--out", folder).code == 0
    usual = models.build("mlp_bn", width=16, in_channels=1, image_size=28)
    assert command_line("export", folder, "--client", 1).out == f"{folder / 'client-1.safetensors'}\n"
    usual.load_state_dict(load_file(folder / "client-1.safetensors"))
    done = command_line("export", folder, "--client", 1, "--fold")
    assert (done.code, done.out) == (0, f"{folder / 'client-1-folded.safetensors'}\n")
    plain = fold(usual)
    plain.load_state_dict(load_file(folder / "client-1-folded.safetensors"))
    assert largest_gap(usual.eval(), plain.eval(), 1, 28, 28) <= 1e-5
    assert metadata(folder / "client-1.safetensors")["folded"] == "false"
    assert metadata(folder / "client-1-folded.safetensors")["norms_left"] == "none"
