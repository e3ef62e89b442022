"""Scores of many clients' own models at once: a stack of models, each on rows of its own.

What models have in common is no part of the stack, so layers with common weights take all rows as one batch. Where an
example does not see the others, shorter lists of rows are filled up; where it does, only lists of equal length go
together. The task is asked for the sums of each client alone, on its own rows.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fednorm.core import rng
from fednorm.core.state import Tree
from fednorm.core.task import Sums
from fednorm.engines.stack.attributes import unchanged
from fednorm.errors import FednormError, first_line
from fednorm.halves.site import Sites
from fednorm.scoring.scores import AnyExamples, Examples, on_host

_MOST_BYTES = 1 << 30
"""Of the states of a stack."""
_ROOM_ON_CPU = 200
"""Examples at once on a CPU: enough that calls do not count, few enough that activations stay in its caches."""
_TRIED_ROWS = 8
"""On which is found out whether examples see each other."""

Model = Callable[[int], Tree]
"""The state of a client's model; its tensors may still be on the host."""


class NotStacked(Exception):
    """Models that cannot be tested as a stack."""


class NormsAsFactors(TorchFunctionMode):
    """Batch norms by running statistics are a factor and a summand of each channel, which is how torch computes them.

    Mapped over clients, torch's own would move clients to the channels and back, a copy of all activations each.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        chosen = _batch_norm if func is functional.batch_norm else func
        return chosen(*args, **(kwargs or {}))


def _batch_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    if training or running_mean is None or running_var is None:
        return functional.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    factor = (running_var + eps).rsqrt()
    factor = factor if weight is None else factor * weight
    summand = -running_mean * factor if bias is None else bias - running_mean * factor
    shape = (-1, *[1] * (input.dim() - 2))
    return (input * factor.view(shape)).add_(summand.view(shape))  # on a CPU `addcmul` takes three times as long


class StackScorer:
    """Tests clients' models in stacks; one by one where they cannot be mapped, which is said in one line."""

    def __init__(self, sites: Sites) -> None:
        self._scorer = sites.scorer
        self._model = copy.deepcopy(sites.prepared.model).eval()  # which may keep what it saw, here of a mapping
        self._drawing = sites.habits.drawing(mapped=True)
        self._most = max(1, _MOST_BYTES // sum(entry.bytes for entry in sites.prepared.entries))
        self._room = min(self._scorer.chunk, _ROOM_ON_CPU if sites.device.type == "cpu" else self._scorer.chunk)
        """examples of all clients together that are tested at once"""
        self._alone: bool | None = None
        """whether examples do not see each other; None as long as nobody asked"""
        self._tried = False
        self._failed: str | None = None
        """why models are tested one by one"""

    def each(self, model: Model, pool: AnyExamples, rows: Mapping[int, Tensor]) -> list[Sums]:
        """The task's sums of each client's model on its rows, in the order of the clients."""
        failed = self._failed
        found = self._try(model, pool, rows) if isinstance(pool, tuple) and failed is None else {}
        sums = [found[client] if client in found else self._one(model, pool, rows, client) for client in rows]
        if self._failed != failed:
            print(f"stacked engine: models are tested one by one ({self._failed})", file=sys.stderr)
        return sums

    def _try(self, model: Model, pool: Examples, rows: Mapping[int, Tensor]) -> dict[int, Sums]:
        """Sums of the clients that can be stacked, in stacks as large as memory allows."""
        while True:
            try:
                return dict(self._stacked(model, pool, rows))
            except torch.OutOfMemoryError as error:
                if self._room == 1:
                    self._failed = first_line(error)
                    return {}
                torch.cuda.empty_cache()
                self._room //= 2
            except FednormError:
                raise
            except Exception as error:  # of the mapping, or of the model itself, which then comes again
                self._failed = first_line(error)
                return {}

    def _one(self, model: Model, pool: AnyExamples, rows: Mapping[int, Tensor], client: int) -> Sums:
        state = {key: value.to(self._scorer.device) for key, value in model(client).items()}
        return self._scorer.rows(state, pool, rows[client])

    def _stacked(self, model: Model, pool: Examples, rows: Mapping[int, Tensor]) -> Iterator[tuple[int, Sums]]:
        """Sums of clients that were in some stack."""
        if not self._pays(model, list(rows)):
            return
        for clients in self._groups(model, pool, rows):
            if len(clients) > 1:
                index = filled([rows[client] for client in clients]).to(pool[0].device)
                output = self._outputs([model(client) for client in clients], pool[0][index.flatten()])
                each = zip(output, pool[1][index], [len(rows[client]) for client in clients], strict=True)
                sums = [self._scorer.task.score(own[:count], y[:count]) for own, y, count in each]
                yield from zip(clients, on_host(sums), strict=True)

    def _pays(self, model: Model, clients: Sequence[int]) -> bool:
        """Whether a stack is faster: on a GPU it saves launches, on a CPU only where most weights are common."""
        if len(clients) < 2 or self._scorer.device.type != "cpu":
            return len(clients) > 1
        first, second = (model(client) for client in clients[:2])
        sizes = {key: first[key].nbytes for key in self._scorer.keys}
        return 2 * sum(size for key, size in sizes.items() if first[key] is not second[key]) < sum(sizes.values())

    def _groups(self, model: Model, pool: Examples, rows: Mapping[int, Tensor]) -> list[list[int]]:
        """Clients whose rows make one stack: of about as many each, the most first."""
        groups: list[list[int]] = []
        for client in sorted(rows, key=lambda client: len(rows[client]), reverse=True):
            size, last = len(rows[client]), groups[-1] if groups else []
            width = len(rows[last[0]]) if last else 0
            fits = last and (len(last) + 1) * width <= self._room and len(last) < self._most
            if fits and (size == width or (2 * size > width and self._rows_are_alone(model, pool, rows))):
                last.append(client)
            else:
                groups.append([client])
        return groups

    def _rows_are_alone(self, model: Model, pool: Examples, rows: Mapping[int, Tensor]) -> bool:
        """Whether an example is all that its output depends on, found by putting others beside it."""
        if self._alone is None:
            state = {key: value.to(self._scorer.device) for key, value in model(next(iter(rows))).items()}
            x = self._scorer.inputs(pool[0][:_TRIED_ROWS])
            with torch.no_grad():
                few, many = (self._forward(state, given) for given in (x, torch.cat([x, x[:1].expand_as(x)])))
            near = 1e-8 if few.dtype == torch.float64 else 1e-3
            scale = near * float(few.nan_to_num().abs().max())
            same = torch.allclose(few, many[: len(x)], rtol=near, atol=scale, equal_nan=True)
            self._alone = len(x) > 1 and same
        return self._alone

    def _forward(self, state: Tree, x: Tensor) -> Tensor:
        own = {key: state[key] for key in self._scorer.keys}
        output: Any = functional_call(self._model, own, (x,), tie_weights=self._scorer.tied)
        if not isinstance(output, Tensor) or len(output) != len(x):
            raise NotStacked("the output is no tensor with a row for each example")
        return output

    def _outputs(self, states: Sequence[Tree], raw: Tensor) -> Tensor:
        """(client, example, ...) outputs on raw inputs, those of one client behind those of the other."""
        x = self._scorer.inputs(raw).unflatten(0, (len(states), -1))
        first, device = states[0], self._scorer.device
        own = [key for key in self._scorer.keys if any(state[key] is not first[key] for state in states)]
        # Not as kernels of a stack read them: layers of torch's own would lay out activations so too.
        stack = {key: torch.stack([state[key] for state in states]).to(device).contiguous() for key in own}
        common = {key: first[key].to(device).contiguous() for key in self._scorer.keys if key not in stack}
        mode = self._drawing(rng.key(0).to(device)) if self._drawing else None

        def forward(own: Tree, x: Tensor) -> Tensor:
            with NormsAsFactors(), mode or nullcontext():
                return self._forward({**common, **own}, x)

        with torch.no_grad(), nullcontext() if self._tried else unchanged(self._model):
            output = torch.vmap(forward)(stack, x)
        if mode is not None and mode.drawn:
            raise NotStacked("it draws random numbers in evaluation")
        self._tried = True
        return output


def filled(lists: Sequence[Tensor]) -> Tensor:
    """Lists of rows as one matrix, shorter ones filled up with their first.

    >>> filled([torch.tensor([4, 5, 6]), torch.tensor([7, 8])])
    tensor([[4, 5, 6],
            [7, 8, 7]])
    """
    width = max(map(len, lists))
    return torch.stack([torch.cat([rows, rows[:1].expand(width - len(rows))]) for rows in lists])
