"""Sums of a model's scores on rows of a pool; sums add up over batches, clients and sites."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fednorm.core.state import Tree
from fednorm.core.task import AnyTask, Sums

MOST_NUMBERS = 1 << 26
"""Numbers of a model's output that are kept at a time."""

Examples = tuple[Tensor, Tensor]
"""Raw inputs and labels of a pool, test or training."""
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

    def rows(self, state: Tree, pool: Examples, rows: Tensor | None = None, adapt: Adapt | None = None) -> Sums:
        """The task's sums on some rows of a pool, or on all of it, on the host; `adapt` may move the state."""
        total: Sums = {}
        for output, y in self._outputs(state, pool, rows, adapt):
            for name, value in self.task.score(output, y).items():
                total[name] = total[name] + value if name in total else value
        return _on_host([total])[0]

    def groups(self, state: Tree, pool: Examples, groups: Sequence[Tensor]) -> list[Sums]:
        """`rows` for each of many groups of rows; a row goes through the model once, whoever has it."""
        rows = torch.unique(torch.cat(list(groups)))
        kept: list[Tensor] = []
        for output, _ in self._outputs(state, pool, rows, None):
            if output[0].numel() * len(rows) > MOST_NUMBERS:
                return [self.rows(state, pool, group) for group in groups]
            kept.append(output)
        outputs, labels = torch.cat(kept), pool[1]
        index = torch.empty(len(labels), dtype=torch.int64).index_copy_(0, rows, torch.arange(len(rows)))
        each = ((index[group].to(labels.device), group.to(labels.device)) for group in groups)
        return _on_host([self.task.score(outputs[at], labels[group]) for at, group in each])

    def _outputs(
        self, state: Tree, pool: Examples, rows: Tensor | None, adapt: Adapt | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(output, labels), chunk by chunk."""
        x, y = pool
        count = len(x) if rows is None else len(rows)
        size = self.batch_size if adapt else self.chunk
        state = {key: state[key] for key in self.keys}
        model = self.model.eval()
        for start in range(0, count, size):
            stop = min(count, start + size)
            part: slice | Tensor = slice(start, stop) if rows is None else rows[start:stop].to(x.device)
            with torch.no_grad():
                inputs = self.inputs(x[part])
                if adapt and stop - start > 1:
                    state = adapt(state, inputs)
                output = functional_call(model, state, (inputs,), tie_weights=self.tied)
            yield output, y[part]


def _on_host(totals: Sequence[Sums]) -> list[Sums]:
    """Sums as numbers of the host; all of a name at once, since each question to a GPU costs more than its answer."""
    names = list(totals[0])
    columns = [torch.stack([total[name] for total in totals]).cpu().unbind() for name in names]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)] if names else list(totals)
