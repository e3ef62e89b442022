"""What server and clients say to each other: plain frozen data, the same in a simulator and over a wire.

A server and a client agree on `Terms`. Then the server sends a `Request` for every exchange a client takes part in,
and the client answers with an `Update`, or with `Sums` where it was asked for scores. `fednorm.halves.wire` turns all
of them into bytes and back.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

from torch import Tensor

from fednorm.core.phases import PhaseId, Purpose
from fednorm.core.report import Report
from fednorm.core.state import Tree

PROTOCOL = 3
"""The version of these messages; both sides must speak the same."""


@dataclass(frozen=True, kw_only=True)
class LocalWork:
    """What every client does in a round, whatever the method: the numbers that a config or a server sets."""

    seed: int = 0
    rounds: int = 1
    unit: Literal["steps", "epochs"] = "epochs"
    """of local work in a round"""
    amount: int = 1
    batch_size: int = 20
    augmentation: str = "none"
    val_fraction: float = 0.0
    optimizer: str = "sgd"
    """expression of the local optimizer; both sides must know it"""
    lr: float = 0.05
    head_lr: float | None = None
    """of the model's head (`core.roles`), where it is another"""
    momentum: float = 0.9
    weight_decay: float = 0.0
    decay_vectors: bool = True
    schedule: str = "constant"
    warmup: float = 0.0
    """rounds in which the learning rate rises to what the schedule says, or a share below 1 of all"""
    dtype: str = "float32"
    chunk: int = 500
    """examples scored at once"""
    total_steps: int = 1
    """of an average client in the whole run, for layers whose schedule spans the training"""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What server and clients agree on before the first round; JSON values only. Every message names its digest."""

    run: str
    method: str
    weights: str
    """of clients where the method sets none: size or uniform"""
    model: str
    schema: str
    """digest of all entries with shapes, types and policies in every phase"""
    initial: str
    """digest of the state that all start from"""
    work: LocalWork
    task: str = ""
    """name of the task that all sites must have; empty where the server does not say"""
    protocol: int = PROTOCOL

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Hello:
    """How a client introduces itself."""

    name: str
    num_examples: int
    """training examples it has, those it will set aside for validation included"""
    schema: str
    """digest of its model's entries, before any surgery"""
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    """of fednorm, torch and Python"""
    protocol: int = PROTOCOL


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """The server's answer to a `Hello` it agrees with."""

    client: int
    """the number of this client among all, in the order of their names"""
    terms: Terms


@dataclass(frozen=True)
class Refusal:
    """The server's answer to what it cannot use: one line that says why."""

    why: str


@dataclass(frozen=True, kw_only=True)
class Address:
    """Which exchange of which run: `number` counts all exchanges of a run, `attempt` how often this one was begun."""

    terms: str
    number: int
    attempt: int = 1


@dataclass(frozen=True, kw_only=True)
class Request:
    """What one client is asked for in an exchange, with the entries it is sent (shared or frozen)."""

    client: int
    address: Address
    round: int
    phase: PhaseId
    numbers: Mapping[str, float]
    """of its steps: learning rate, momentum, weight decay and those of the method"""
    accepted: int
    """the last exchange of which the server took this client's update, 0 if none: what it may call its own state"""
    probing: bool = False
    tree: Tree = field(default_factory=dict[str, Tensor])

    @property
    def purpose(self) -> Purpose:
        return self.phase.purpose


@dataclass(frozen=True)
class Update:
    """All that a client sends of its work: its report, the entries to merge, and those the server keeps per client."""

    report: Report
    shared: Tree
    reported: Tree = field(default_factory=dict[str, Tensor])
    probed: Mapping[str, float] = field(default_factory=dict[str, float])
    """what probes saw of its last step"""
    address: Address | None = None
    """of the request it answers; None inside one process, where nothing can be mixed up"""

    @property
    def client(self) -> int:
        return self.report.client


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Sums of a client's tests by protocol; sums of several clients add up."""

    client: int
    address: Address
    sums: Mapping[str, Mapping[str, Any]]
    """protocol (`own_client`, `validation`) to the task's sums, float64 tensors by name"""

    def as_lists(self) -> dict[str, dict[str, Any]]:
        """The sums as JSON has them."""
        return {
            protocol: {name: value.tolist() for name, value in sums.items()} for protocol, sums in self.sums.items()
        }


Message = Hello | Welcome | Refusal | Request | Update | Scores
