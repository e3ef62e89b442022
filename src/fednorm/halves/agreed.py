"""What server and clients both have before the first round: the method with its model, and the local work."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property

import torch

from fednorm.core.method import Method
from fednorm.core.optim import Optimizer
from fednorm.core.phases import PhaseId, Purpose
from fednorm.core.schedule import lr_factor, warmup_factor
from fednorm.core.state import Kind, Tree
from fednorm.halves.messages import LocalWork
from fednorm.halves.prepared import Prepared
from fednorm.halves.prepared_phase import PreparedPhase, prepare_phase
from fednorm.halves.schema import DOWN


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """A prepared model and the local work; all that phases are is worked out here, once."""

    prepared: Prepared
    work: LocalWork
    optimizer: Optimizer
    device: torch.device
    _phases: dict[PhaseId, PreparedPhase] = field(
        init=False, repr=False, compare=False, default_factory=dict[PhaseId, PreparedPhase]
    )
    _numbers: dict[PhaseId, tuple[int, dict[str, float]]] = field(
        init=False, repr=False, compare=False, default_factory=dict[PhaseId, tuple[int, dict[str, float]]]
    )

    @property
    def method(self) -> Method:
        return self.prepared.method

    def phase(self, id: PhaseId) -> PreparedPhase:
        """The phase with an address, as it is with this model."""
        if id not in self._phases:
            self._phases[id] = prepare_phase(self.prepared, id, self.optimizer)
        return self._phases[id]

    def evaluated(self, stage: int) -> PreparedPhase:
        """What a tested model consists of in a stage."""
        return self.phase(PhaseId(Purpose.SCORE, stage % len(self.method.stages)))

    @cached_property
    def phases(self) -> tuple[PreparedPhase, ...]:
        """Every exchange of the method."""
        return tuple(self.phase(id) for id in self.method.all_phases)

    def initial(self) -> Tree:
        """The server's first state; what has no initial value starts at zero where the server keeps it."""
        tree = {key: value.to(self.device) for key, value in self.prepared.initial.items()}
        for phase in self.phases:
            for key, (entry, policy) in phase.schema.items():
                made = entry.kind is Kind.OPTIMIZER or entry.extra
                if made and policy in DOWN:
                    tree[key] = torch.zeros(entry.shape, dtype=entry.dtype, device=self.device)
        return tree

    def numbers(self, id: PhaseId, round: int) -> dict[str, float]:
        """The numbers of a client's steps in a round."""
        known = self._numbers.get(id)
        if known is None or known[0] != round:  # a round asks twice, once for its row and once for its clients
            known = self._numbers[id] = round, self._numbers_of(id, round)
        return dict(known[1])

    def _numbers_of(self, id: PhaseId, round: int) -> dict[str, float]:
        work = self.work
        lr = work.lr * lr_factor(work.schedule, round, work.rounds)
        if work.warmup:
            lr *= warmup_factor(work.warmup, round, work.rounds)
        numbers = {"lr": lr, "momentum": work.momentum, "weight_decay": work.weight_decay}
        for each in self.phase(id).passes:
            numbers |= each.rule.numbers
        return numbers

    @cached_property
    def schema_digest(self) -> str:
        """A hash of all entries with their shapes, types and policies in every phase."""
        listing = [
            [str(phase.id), key, entry.kind, list(entry.shape), str(entry.dtype), policy]
            for phase in self.phases
            for key, (entry, policy) in phase.schema.items()
        ]
        return hashlib.sha256(json.dumps(listing).encode()).hexdigest()
