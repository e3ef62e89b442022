"""Sums of a model's scores on rows of a pool; sums add up over batches, clients and sites."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fednorm.core.state import Tree
from fednorm.core.task import AnyTask, Sums

MOST_NUMBERS = 1 << 26
"""Numbers of a model's output that are kept at a time."""


class Readable(Protocol):
    """Examples that are not in memory."""

    def __len__(self) -> int: ...
    def parts(self, rows: Tensor | None, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(inputs, labels) of some rows, or of all, in parts of some size; equal in every read."""
        ...


Examples = tuple[Tensor, Tensor]
"""Raw inputs and labels of a pool, test or training."""
AnyExamples = Examples | Readable
Adapt = Callable[[Tree, Tensor], Tree]
"""(state, inputs of a batch) -> the state to test this batch with."""


@dataclass(frozen=True)
class Scorer:
    """A model with a task, ready to be tested in any state."""

    model: nn.Module
    keys: Collection[str]
    """of the model's own entries, since states may hold more"""
    tied: bool
    task: AnyTask
    inputs: Callable[[Tensor], Tensor]
    """raw rows as the model's numbers"""
    chunk: int
    """examples tested at once"""
    batch_size: int
    """examples tested at once where the state moves with each batch, as in training"""
    device: torch.device

    def rows(self, state: Tree, pool: AnyExamples, rows: Tensor | None = None, adapt: Adapt | None = None) -> Sums:
        """The task's sums on some rows of a pool, or on all of it, on the host; `adapt` may move the state."""
        total: Sums = {}
        for output, y in self._outputs(state, pool, rows, adapt):
            for name, value in self.task.score(output, y).items():
                total[name] = total[name] + value if name in total else value
        return on_host([total])[0]

    def groups(self, state: Tree, pool: AnyExamples, groups: Sequence[Tensor]) -> list[Sums]:
        """`rows` for each of many groups of rows; a row goes through the model once, whoever has it."""
        rows = torch.unique(torch.cat(list(groups)))
        kept: list[tuple[Tensor, Tensor]] = []
        for output, y in self._outputs(state, pool, rows, None):
            if output[0].numel() * len(rows) > MOST_NUMBERS:
                return [self.rows(state, pool, group) for group in groups]
            kept.append((output, y))
        outputs, labels = (torch.cat(parts) for parts in zip(*kept, strict=True))
        index = torch.empty(int(rows[-1]) + 1, dtype=torch.int64).index_copy_(0, rows, torch.arange(len(rows)))
        each = (index[group].to(labels.device) for group in groups)
        return on_host([self.task.score(outputs[at], labels[at]) for at in each])

    def _outputs(
        self, state: Tree, pool: AnyExamples, rows: Tensor | None, adapt: Adapt | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(output, labels), chunk by chunk."""
        size = self.batch_size if adapt else self.chunk
        state = {key: state[key] for key in self.keys}
        model = self.model.eval()
        parts = _parts(*pool, rows, size) if isinstance(pool, tuple) else self._read(pool, rows, size)
        for x, y in parts:
            with torch.no_grad():
                inputs = self.inputs(x)
                if adapt and len(x) > 1:
                    state = adapt(state, inputs)
                try:
                    output = functional_call(model, state, (inputs,), tie_weights=self.tied)
                except RuntimeError:
                    # A model that calls `view` on its activations depends on their layout, which is that of its
                    # filters; any other error comes again.
                    state = {key: value.clone(memory_format=torch.contiguous_format) for key, value in state.items()}
                    output = functional_call(model, state, (inputs,), tie_weights=self.tied)
            yield output, y

    def _read(self, pool: Readable, rows: Tensor | None, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in pool.parts(rows, size):
            yield x.to(self.device), y.to(self.device)


def _parts(x: Tensor, y: Tensor, rows: Tensor | None, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Examples in memory, chunk by chunk."""
    count = len(x) if rows is None else len(rows)
    for start in range(0, count, size):
        part = slice(start, start + size) if rows is None else rows[start : start + size].to(x.device)
        yield x[part], y[part]


def on_host(totals: Sequence[Sums]) -> list[Sums]:
    """Sums as numbers of the host; all of a name at once, since each question to a GPU costs more than its answer."""
    names = list(totals[0])
    columns = [torch.stack([total[name] for total in totals]).cpu().unbind() for name in names]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)] if names else list(totals)
