"""Models to be timed: which, with which parts of a method, on which images, by how many clients."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from fednorm.core.expression import parse_term
from fednorm.errors import ConfigError
from fednorm.halves.prepared import prepare
from fednorm.methods import parse
from fednorm.models import build

CLASSES, CHANNELS = 10, 3
TABLE = (
    "resnet20:5/20/100,resnet20+gn:15,resnet18:5/20,vit_tiny:5/20,mobilenet_v2:5/20,digit_cnn:5/20,"
    "fedbs_cifar_cnn:5,lenet_cnn:5,alexnet_bn@96:5,deeplabv3plus@192:5"
)
"""The models of the published table."""
_CASE = re.compile(r"(?P<model>[^+@:]+)(\+(?P<parts>[^@:]+))?(@(?P<pixels>[1-9]\d*))?(:(?P<clients>\d+(/\d+)*))?")


@dataclass(frozen=True)
class Case:
    """A model for square images, with what a method makes of it."""

    model: str
    parts: str = ""
    pixels: int = 32
    clients: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """As it was asked for, without the numbers of clients."""
        return self.model + (f"+{self.parts}" if self.parts else "") + (f"@{self.pixels}" if self.pixels != 32 else "")

    @property
    def method(self) -> str:
        return f"fedavg+{self.parts}" if self.parts else "fedavg"

    def build(self) -> nn.Module:
        """The network, after the method's surgery."""
        term = parse_term(self.model, "model", "resnet20(shortcut=B)")
        net = build(term.name, num_classes=CLASSES, in_channels=CHANNELS, image_size=self.pixels, **term.options)
        return prepare(net, parse(self.method)).model if self.parts else net


@cache
def labels_of(case: Case) -> tuple[int, ...]:
    """The shape of the labels of an image: none for a class, that of the image where every pixel has one."""
    net = case.build().to("meta").eval()
    outputs: Tensor = net(torch.empty(1, CHANNELS, case.pixels, case.pixels, device="meta"))
    return tuple(outputs.shape[2:])


def read_cases(text: str, clients: tuple[int, ...]) -> tuple[Case, ...]:
    """Cases from a list on the command line; those that name no clients are timed with these.

    >>> [(case.name, case.clients) for case in read_cases("resnet20+gn:15,alexnet_bn@96", (5, 20))]
    [('resnet20+gn', (15,)), ('alexnet_bn@96', (5, 20))]
    """
    pieces = [piece.strip() for piece in re.split(r",(?![^(]*\))", text) if piece.strip()]
    found = [(piece, _CASE.fullmatch(piece)) for piece in pieces]
    for piece, match in found:
        if match is None:
            raise ConfigError(f"--models {piece} cannot be read; give names such as resnet20+gn or alexnet_bn@96:5/20")
    if not found:
        raise ConfigError(f"--models {text!r} names no model; give names such as resnet20,vit_tiny")
    return tuple(
        Case(
            model=match["model"],
            parts=match["parts"] or "",
            pixels=int(match["pixels"] or 32),
            clients=tuple(map(int, match["clients"].split("/"))) if match["clients"] else clients,
        )
        for _, match in found
        if match is not None
    )
