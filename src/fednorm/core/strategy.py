"""A strategy is data: when updates that arrive one by one become a version of the server's model, and how.

A method says what a client does and what is merged; a strategy says nothing of that. It says how many updates make a
version, how much a stale one counts and whether clients wait for each other. The server's half
(`fednorm.halves.arrivals`) reads it, wherever the clients are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fednorm.core.method import Facts, Method
from fednorm.core.report import Report
from fednorm.core.state import Kind, Tree
from fednorm.core.task import AnyTask
from fednorm.errors import ConfigError

Discount = Callable[[int], float]
"""Staleness, in versions, -> what an update counts: 1 for a fresh one."""

Adds = Callable[[Method], str]
"""The method -> parts of methods, as an expression, that the strategy needs beside it; empty where it needs none.

So a client that knows the method's whole name knows all it has to do. It may refuse a method with a `ConfigError`.
"""


@dataclass(frozen=True)
class Constant:
    """A stale update counts as much as a fresh one."""

    def __call__(self, staleness: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Arrived:
    """An update that is to be merged now, and what the server knows of it."""

    number: int
    """of the job, counted through the run"""
    staleness: int
    """versions made between what the client was sent and now"""
    version: int
    """that the server is at"""
    report: Report
    shared: Tree
    """as the client sent it"""
    reported: Tree
    base: Tree
    """what the client was sent of the server's tree: what clients keep local is not in it"""
    moved: Tree
    """its trained entries in float64 as they would be merged: x_k + (w - w_base), x_k itself where w is w_base"""
    hold: frozenset[Kind] = frozenset()
    """kinds that training leaves as they are, by the phase of now (`Rule.hold`)"""

    @property
    def client(self) -> int:
        return self.report.client

    @property
    def whole(self) -> Tree:
        """The client's model as far as the server knows it: what it sent, then what it was sent, by key."""
        return {**self.base, **self.shared, **self.reported}


class Programs(Protocol):
    """Where functions that come often are played on a device that gains by knowing them."""

    model: nn.Module
    """the classifier again, which mapped over trees (`torch.vmap`) is one network of a stack"""

    def play(self, name: Hashable, function: Callable[[Tree], Tree], given: Tree) -> Tree | None:
        """What a function makes of tensors, there until it is played again; None where it cannot be a program.

        It is the same function whenever it has this name and is given tensors of these shapes.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a reviser may know of the run before the first update."""

    model: nn.Module
    """after surgery, its own copy, for `torch.func.functional_call(model, tree, (x,), tie_weights=tied)`"""
    facts: Facts
    tied: bool = False
    device: torch.device
    seed: int
    clients: Sequence[int]
    initial: Tree
    """the server's tree at version 0"""
    task: AnyTask | None = None
    num_classes: int = 0
    """0 where nobody knows"""
    input_shape: tuple[int, ...] = ()
    """of one example as the model gets it, such as (3, 32, 32)"""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    """by which images in [0, 1] become inputs; empty where inputs are taken as they are"""
    proportions: Callable[[int], Sequence[float]] | None = None
    """client -> shares of the classes in its data, where somebody may know them"""
    examples: tuple[Tensor, Tensor] | None = None
    """real inputs and labels at the server, for strategies that must not be without"""
    programs: Programs | None = None
    """None where functions are best played as they are"""
    narrow: torch.dtype | None = None
    """what clients round to inside products and activations, such as bfloat16; None where they do not"""


class Memory(NamedTuple):
    """What a reviser remembers; both go into every checkpoint, so nothing else may be remembered."""

    facts: Mapping[str, Any]
    """JSON values"""
    tree: Tree
    """tensors by name"""


class Revise(Protocol):
    """What the server computes itself of updates before it merges them."""

    def begin(self, context: Context) -> Memory:
        """What is remembered before the first update; drawn by `core.rng` with the context's seed alone."""
        ...

    def revise(
        self, arrivals: Sequence[Arrived], server: Tree, memory: Memory, context: Context
    ) -> tuple[Sequence[Tree | None], Memory]:
        """What to merge in place of `moved`, for each of the updates of a version in the order they arrived.

        None leaves an update as it is, to the bit. A tree has values, not differences, for some or all keys of
        `moved`; the others stay. Neither trees nor memory that are given may change: return new ones.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How arrivals become versions.

    Of a trained entry w the next version is (1 - rate) w + rate * merge of (x_k + (w - w_base,k)), by the method's own
    merge and weights, where the difference of a stale update is multiplied by its discount. What is not trained, such
    as statistics, has no direction to go on in: it is merged as a value.
    """

    name: str = ""
    buffer: int = 1
    """updates that make a version"""
    rate: float = 1.0
    """of the server"""
    discount: Discount = field(default_factory=Constant)
    weights: Literal["method", "uniform"] = "method"
    """of updates among those of a version; `uniform` in place of weights by size"""
    form: Literal["moves", "models"] = "moves"
    """what a stale client brings: the way it went from where it began, or the model it arrived at"""
    barrier: bool = False
    """whether all that are under way make a version together, and nobody is sent anything before"""
    statistics: Literal["values", "discounted", "fresh"] = "values"
    """How stale values that are not trained count: as fresh ones do, by the discount, or not at all.

    The server keeps the share of its own values that is left over, and none where the rate is 1 or more.
    """
    fresh: int = 0
    """the largest staleness that is `fresh`"""
    revise: Revise | None = None
    adds: Adds | None = None

    def __post_init__(self) -> None:
        if self.buffer < 1:
            raise ConfigError(f"b={self.buffer} updates make no version; give 1 or more")
        if not 0 < self.rate < math.inf:
            raise ConfigError(f"lr={self.rate} is no rate of a server; give a number above 0")
        if self.fresh < 0:
            raise ConfigError(f"fresh={self.fresh} is no staleness; give 0 or more")
        if self.fresh and self.statistics != "fresh":
            raise ConfigError(
                f"fresh={self.fresh} is for statistics=fresh, not {self.statistics}; add it, or leave it out"
            )

    def counts(self, staleness: int) -> float:
        """What an update counts; 1 to the bit for a fresh one, whatever the discount rounds to."""
        if not staleness:
            return 1.0
        count = self.discount(staleness)
        fits = isinstance(count, int | float) and 0 <= count < math.inf  # pyright: ignore[reportUnnecessaryIsInstance]
        if not fits:  # NaN neither
            raise ConfigError(
                f"'{self.name}' counts an update that is {staleness} versions old {count!r}; give 0 or more, and finite"
            )
        return count

    def value_counts(self, staleness: int) -> float:
        """What values that are not trained count."""
        if self.statistics == "fresh":
            return float(staleness <= self.fresh)
        return self.counts(staleness) if self.statistics == "discounted" else 1.0
