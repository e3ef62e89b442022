"""The statistics of a client that never trained: taken anew from its data, or moved by each test batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fednorm.core import rng
from fednorm.core.newcomer import Newcomer
from fednorm.core.state import Kind, Tree, is_batch_norm
from fednorm.core.step import Batch, Carry, StepSpec, forward, training_mode
from fednorm.layers.batch_stats import moments
from fednorm.pieces.moments import TakeMoments, std_eps


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
    """Each unlabelled test batch moves the statistics towards its own, layer by layer in one pass (as TsmoBN does).

    What enters a layer was normalised below it with statistics that the same batch has moved already.
    """

    momentum: float = 0.1
    name: ClassVar[str] = "track"
    uses_batches: ClassVar[bool] = True

    def from_batch(self, spec: StepSpec, state: Tree, x: Tensor) -> Tree:
        statistics = {key for key, entry in spec.facts.entries.items() if entry.kind is Kind.STATISTIC}
        moved = {key: value.clone() if key in statistics else value for key, value in state.items()}
        with torch.no_grad(), _tracking(spec.model.eval(), self.momentum):
            forward(spec, moved, x, rng.key(0).to(x.device))
        return moved


@contextmanager
def _tracking(model: nn.Module, momentum: float) -> Iterator[None]:
    """Each batch norm moves its statistics towards those of what enters it, and then normalises with the moved ones."""

    def track(module: nn.Module, args: tuple[Any, ...]) -> None:
        mean, var = moments(args[0])
        fresh = {"running_mean": mean, "running_var": var, "running_std": (var + std_eps(module)).sqrt()}
        for part, value in fresh.items():
            running = getattr(module, part, None)
            if running is not None:
                running.add_(momentum * (value - running))

    hooks = [module.register_forward_pre_hook(track) for module in model.modules() if is_batch_norm(module)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
