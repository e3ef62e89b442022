"""What is under way between a server and clients that come one by one, and what became of it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fednorm.core.phases import PhaseId
from fednorm.core.state import Tree
from fednorm.core.strategy import Arrived, Context, Memory, Revise
from fednorm.halves.agreed import Agreed
from fednorm.halves.messages import Update
from fednorm.halves.norm_bound import Moved
from fednorm.halves.server import Row


class Flight(NamedTuple):
    """A job that a client has."""

    number: int
    client: int
    version: int
    """of the model that it was sent"""
    phase: PhaseId


@dataclass(frozen=True)
class Landing:
    """An update that came back, and what was found out about it where somebody looked before."""

    number: int
    update: Update | None
    """None where it never came"""
    why: str = ""
    """it cannot be used"""
    moved: Moved | None = None
    """how far it went"""
    looked: bool = False
    """whether somebody looked at form and values, and how far it went"""


@dataclass(frozen=True)
class Arrival:
    """What became of an update."""

    client: int
    number: int
    staleness: int
    """versions that were made while the client worked"""
    version: int
    """of the server's model, with this update in it if it completed one"""
    refused: str = ""
    """why it was not used"""
    row: Row | None = None
    """the facts of the version that it completed"""


def context_of(agreed: Agreed, clients: Sequence[int], **more: Any) -> Context:
    """What a reviser may know of a run; `more` is what only the caller knows, such as the classes."""
    prepared = agreed.prepared
    return Context(
        model=copy.deepcopy(prepared.model),
        facts=prepared.facts,
        tied=prepared.tied,
        device=agreed.device,
        seed=agreed.work.seed,
        clients=clients,
        initial=agreed.initial(),
        **more,
    )


@dataclass
class Reviser:
    """What a strategy computes itself of updates, with what it remembers."""

    revise: Revise
    context: Context
    memory: Memory

    def __call__(self, arrived: Sequence[Arrived], server: Tree) -> Sequence[Tree | None]:
        values, self.memory = self.revise.revise(arrived, server, self.memory, self.context)
        return values
