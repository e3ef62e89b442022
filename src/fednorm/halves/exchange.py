"""What a server asks for at a time, and where its state lies meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from fednorm.core import rng
from fednorm.core.phases import Purpose
from fednorm.core.state import Tree
from fednorm.errors import DivergedError
from fednorm.halves.prepared_phase import PreparedPhase


@dataclass(frozen=True)
class Exchange:
    """What the server asks for now: one phase, of these clients."""

    number: int
    attempt: int
    round: int
    phase: PreparedPhase
    cohort: Sequence[int]
    numbers: Mapping[str, float]
    shares: Mapping[int, float] = field(default_factory=dict[int, float])
    """of their local steps that slow clients do; all others do all"""

    @property
    def purpose(self) -> Purpose:
        return self.phase.id.purpose

    @property
    def keeps(self) -> bool:
        """Whether what clients keep changes; a test leaves it alone."""
        return self.purpose in (Purpose.TRAIN, Purpose.FINISH)


class Holder(Protocol):
    """Where the server's tree and what merges remember lie: in memory, or where an engine has them at hand."""

    @property
    def tree(self) -> Tree: ...
    @tree.setter
    def tree(self, tree: Tree, /) -> None: ...
    @property
    def memory(self) -> Tree: ...
    @memory.setter
    def memory(self, tree: Tree, /) -> None: ...
    @property
    def facts(self) -> Mapping[str, Any]:
        """What else must be known, as JSON values, to go on with the same bits."""
        ...

    @facts.setter
    def facts(self, facts: Mapping[str, Any], /) -> None: ...


@dataclass
class Held:
    """Both in memory."""

    tree: Tree
    memory: Tree = field(default_factory=dict[str, Tensor])
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])


def diverged(round: int, where: str) -> DivergedError:
    """The error of a run whose numbers are numbers no longer."""
    error = DivergedError(f"diverged in {where}; lower train.lr, or set engine.quorum to go on without the client")
    error.round = round
    return error


def drawn_cohort(seed: int, round: int, clients: Sequence[int], count: int) -> list[int]:
    """The clients that a round draws, ascending."""
    if count == len(clients):
        return list(clients)
    return [clients[index] for index in rng.subset(rng.key(seed, "cohort", round), len(clients), count)]


def drawn_client(seed: int, job: int, clients: Sequence[int], busy: Collection[int]) -> int:
    """One of the clients, ascending by id, that have nothing to do, for the job of this number; each is as likely.

    >>> drawn_client(0, 1, range(4), {0, 1, 3})
    2
    """
    place = rng.as_seed(rng.key(seed, "dispatch", job)) % (len(clients) - len(busy))
    for taken in sorted(busy):
        if taken > clients[place]:
            break
        place += 1
    return clients[place]
