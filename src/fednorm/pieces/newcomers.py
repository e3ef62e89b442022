"""The statistics of a client that never trained: taken anew from its data, or moved by each test batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fednorm.core import rng
from fednorm.core.newcomer import Newcomer
from fednorm.core.state import Tree
from fednorm.core.step import Batch, Carry, StepSpec, forward, training_mode
from fednorm.layers.batch_stats import moments
from fednorm.pieces.moments import TakeMoments, inputs_of_norms, std_eps


@dataclass(frozen=True)
class Reestimate(Newcomer):
    """The statistics are taken anew from the newcomer's unlabelled data (AdaBN, SiloBN's transfer protocol)."""

    name: ClassVar[str] = "reestimate"
    uses_data: ClassVar[bool] = True

    def from_data(self, spec: StepSpec, state: Tree, batches: Iterable[tuple[Tensor, Tensor]]) -> Tree:
        step = TakeMoments("pooled")(spec)
        carry = Carry({}, {key: state[key] for key in spec.facts.entries}, {}, {}, {})
        with training_mode(spec.model, frozenset()):
            for x, y in batches:
                nothing = torch.zeros((), dtype=torch.int64, device=x.device)
                carry, _ = step(carry, Batch(x, y, nothing), {})
        return {**state, **carry.state}


@dataclass(frozen=True)
class Track(Newcomer):
    """Each unlabelled test batch moves the statistics towards its own (as TsmoBN does)."""

    momentum: float = 0.1
    name: ClassVar[str] = "track"
    uses_batches: ClassVar[bool] = True

    def from_batch(self, spec: StepSpec, state: Tree, x: Tensor) -> Tree:
        scratch = {key: value.clone() for key, value in state.items()}
        with torch.no_grad(), training_mode(spec.model, frozenset()), inputs_of_norms(spec.model) as seen:
            forward(spec, scratch, x, rng.key(0).to(x.device))
        moved = dict(state)
        for layer, inputs in seen.items():
            prefix = f"{layer}." if layer else ""
            mean, var = moments(inputs)
            std = (var + std_eps(spec.model.get_submodule(layer))).sqrt()
            for part, fresh in (("running_mean", mean), ("running_var", var), ("running_std", std)):
                key = prefix + part
                if key in moved:
                    moved[key] = moved[key] + self.momentum * (fresh - moved[key])
        return moved
