"""A step that also counts the labels it trains on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from fednorm.core.method import Phase
from fednorm.core.step import Batch, Carry, Seen, Step, StepMaker, StepSpec
from fednorm.layers.label_counts import counts_key
from fednorm.pieces.changes import PhaseChange

if TYPE_CHECKING:
    from fednorm.core.method import Numbers


@dataclass(frozen=True)
class Counting:
    """A step, after which the client's counts have the labels of its batch in them."""

    step: StepMaker

    def __call__(self, spec: StepSpec) -> Step:
        inner, key = self.step(spec), counts_key(spec.model)

        def step(carry: Carry, batch: Batch, numbers: Numbers) -> tuple[Carry, Seen]:
            carry, seen = inner(carry, batch, numbers)
            if key is None:
                return carry, seen
            counts = carry.state[key]
            classes = torch.arange(len(counts), device=batch.y.device)
            found = (batch.y.reshape(-1, 1) == classes).sum(0).to(counts.dtype)
            return carry._replace(state={**carry.state, key: counts + found}), seen

        return step


@dataclass(frozen=True)
class CountLabels(PhaseChange):
    """The first pass of every phase counts the labels of its batches."""

    def changed(self, phase: Phase) -> Phase:
        return replace(phase, step=Counting(phase.step))
