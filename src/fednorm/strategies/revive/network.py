"""The classifier as the server runs it: a function of any tree of its state, and its layers that have statistics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fednorm.core.method import Facts
from fednorm.core.state import Entry, Kind, is_batch_norm
from fednorm.core.step import training_mode
from fednorm.core.strategy import Context
from fednorm.layers.keyed import key_names
from fednorm.layers.stand_ins import StandIns
from fednorm.layers.stat_tracker import StatTracker

Source = Literal["tracker", "bn", "none"]
"""Which layers' statistics the feature loss matches."""
Mode = Literal["still", "batch", "train"]
"""`still`: evaluation. `batch`: so, but batch norms use the batch. `train`: training, whose statistics are dropped."""


class Watched(NamedTuple):
    """A layer with statistics, and the keys of these."""

    layer: str
    mean: str
    spread: str
    is_std: bool


@dataclass(frozen=True)
class Network:
    """A model as a function of its state."""

    model: nn.Module
    facts: Facts
    tied: bool = False
    hold: frozenset[Kind] = frozenset()
    """what training leaves as it is"""
    narrow: torch.dtype | None = None
    """what products and activations are rounded to, where clients do so too"""
    mapped: bool = False
    """whether it is mapped over trees (`torch.vmap`)"""

    @classmethod
    def of(cls, context: Context) -> Network:
        return cls(context.model, context.facts, context.tied, narrow=context.narrow)

    def __call__(
        self, tree: Mapping[str, Tensor], x: Tensor, mode: Mode = "still", key: Tensor | None = None
    ) -> Tensor:
        """The logits of some inputs; in training, random layers draw from the key."""
        state = {name: tree[name] for name in self.facts.entries}
        if mode != "still":  # layers move their statistics and counters in place
            state |= {name: state[name].clone() for name in self._moving}
        drawing = nullcontext()
        if mode == "train" and key is not None:
            state |= dict.fromkeys(key_names(self.model), key)
            drawing = StandIns(key, self.mapped)
        if self.narrow is not None and x.dim() == 4:  # what tensor cores read without a copy
            x = x.contiguous(memory_format=torch.channels_last)
        with self._in(mode), drawing, self.rounding(x.device):
            logits = cast(Tensor, functional_call(self.model, state, (x,), tie_weights=self.tied))
        return logits.to(x.dtype)

    def in_stack(self, model: nn.Module) -> Network:
        """The same of a model whose layers round by themselves, to be mapped over trees."""
        return replace(self, model=model, narrow=None, mapped=True)

    def rounding(self, device: torch.device) -> AbstractContextManager[object]:
        """In which products are as narrow as those of clients."""
        return nullcontext() if self.narrow is None else torch.autocast(device.type, self.narrow)

    @property
    def _moving(self) -> list[str]:
        return [name for name, entry in self.facts.entries.items() if not entry.trainable]

    @contextmanager
    def _in(self, mode: Mode) -> Iterator[None]:
        if mode == "train":
            with training_mode(self.model, self.hold):
                for module in self.model.modules():
                    if isinstance(module, StatTracker):  # what it would track is thrown away
                        module.eval()
                yield
            return
        self.model.eval()
        norms = [module for module in self.model.modules() if mode == "batch" and is_batch_norm(module)]
        for module in norms:
            module.train()
        try:
            yield
        finally:
            self.model.eval()

    def watched(self, source: Source) -> tuple[Watched, ...]:
        """The layers whose statistics come from there."""
        layers: dict[str, dict[str, Entry]] = defaultdict(dict)
        for entry in self.facts.entries.values():
            if entry.kind is Kind.STATISTIC and source != "none" and entry.batch_norm == (source == "bn"):
                layers[entry.layer][entry.part] = entry
        return tuple(
            Watched(layer, parts["running_mean"].key, parts[spread].key, spread == "running_std")
            for layer, parts in layers.items()
            for spread in ("running_var", "running_std")
            if {"running_mean", spread} <= parts.keys()
        )

    def mode_of(self, known: Mapping[str, Tensor]) -> Mode:
        """How a model is run of which the server knows these entries: batch norms without statistics use the batch."""
        needed = [entry for entry in self.facts.entries.values() if entry.kind is Kind.STATISTIC and entry.batch_norm]
        return "still" if all(entry.key in known for entry in needed) else "batch"
