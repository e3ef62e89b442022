"""What a benchmark was asked to do, checked before anything is measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from fednorm.bench.cases import Case
from fednorm.bench.timing import Effort
from fednorm.errors import ConfigError, unknown
from fednorm.running.plan import find_device

SECTIONS = ("gpu", "models", "rounds", "pfl", "cpu", "async")
PRECISIONS = ("fp32", "tf32", "bf16")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Sizes of the workloads; the defaults are those of the published tables."""

    sections: tuple[str, ...]
    device: torch.device
    effort: Effort
    model: str = "resnet20"
    clients: tuple[int, ...] = (5, 20, 100)
    local_steps: int = 10
    steps: tuple[int, ...] = (1, 10)
    rounds: int | None = None
    precision: str | None = None
    precisions: tuple[str, ...] = PRECISIONS
    data_dir: str | None = None
    peers: Path | None = None
    cases: tuple[Case, ...] = ()

    def __post_init__(self) -> None:
        at_least = {"--repeats": (self.effort.turns, 1), "--seconds": (self.effort.seconds, 0.01)}
        at_least |= {"--minutes": (self.effort.minutes, 0), "--local-steps": (self.local_steps, 1)}
        at_least |= {"--rounds": (1 if self.rounds is None else self.rounds, 1)}
        at_least |= {"--clients": (min(self.clients), 2), "--steps": (min(self.steps), 1)}
        for name, (value, least) in at_least.items():
            if not value >= least:
                raise ConfigError(f"{name} {value} is out of range; give {least} or more")
        Case(self.model).build()
        for case in self.cases:
            if min(case.clients) < 2:
                raise ConfigError(f"--models {case.name}:{min(case.clients)} is out of range; give 2 clients or more")
            case.build()
        for precision in (*self.precisions, *([self.precision] if self.precision else [])):
            if precision not in PRECISIONS:
                raise unknown("precision", precision, PRECISIONS)
        if self.peers is not None and not self.peers.is_dir():
            raise ConfigError(f"--peers {self.peers} is no folder; give the one with the peers' scripts")


def find_sections(names: list[str], device: str) -> tuple[tuple[str, ...], torch.device]:
    """The sections to run and the device they run on; without names, what this machine does best."""
    for name in names:
        if name not in (*SECTIONS, "all"):
            raise unknown("benchmark", name, (*SECTIONS, "all"))
    found = find_device(device)
    if "all" in names:
        return (SECTIONS if found.type == "cuda" else ("rounds", "pfl", "cpu", "async")), found
    for name in {"gpu", "models"}.intersection(names):
        if found.type != "cuda" and device == "auto":
            raise ConfigError(
                f"benchmark '{name}' needs a CUDA device and this machine has none; "
                "give --device cpu to time its steps here"
            )
    default = ("gpu",) if found.type == "cuda" else ("cpu",)
    return tuple(name for name in SECTIONS if name in names) or default, found


def read_numbers(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers from a list on the command line.

    >>> read_numbers("--clients", "5,20,100")
    (5, 20, 100)
    """
    pieces = [piece.strip() for piece in text.split(",") if piece.strip()]
    if not pieces or not all(piece.isdecimal() for piece in pieces):
        raise ConfigError(f"{option} {text} cannot be read; give whole numbers, such as 1,10")
    return tuple(map(int, pieces))
