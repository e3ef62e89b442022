"""What all clients of a stack do at once: the optimizer's update, and the server's weighted sum."""

# The vmap rules name their arguments, where torch's base class has *args; applying a Function has no useful type.
# pyright: reportIncompatibleMethodOverride=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from fednorm.core.optim import Optimizer
from fednorm.core.optimizers import sgd_update
from fednorm.core.reductions import Cohort
from fednorm.core.state import Tree
from fednorm.engines.stack.kernels import element_ops
from fednorm.engines.stack.kernels.mapped import stacked

if TYPE_CHECKING:
    from fednorm.core.method import Numbers


class _OverStack(torch.autograd.Function):
    """An operator on stacks that has no derivative: alone it runs on a stack of one."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.mark_non_differentiable(*(output if isinstance(output, tuple) else (output,)))


class _Sgd(_OverStack):
    @staticmethod
    def forward(value: Tensor, grad: Tensor, velocity: Tensor | None, *numbers: Tensor) -> Any:
        one = None if velocity is None else velocity.unsqueeze(0)
        alone = (each.unsqueeze(0) for each in numbers)
        new, moved = element_ops.sgd(value.unsqueeze(0), [grad.unsqueeze(0)], one, *alone)
        return new[0], moved if velocity is None else moved[0]

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *args: Tensor | None) -> Any:
        value, grad, velocity, *numbers = stacked(info, dims, *args)
        new, moved = element_ops.sgd(value, [grad], velocity, *numbers)
        return (new, moved), (0, None if velocity is None else 0)


class _Fold(_OverStack):
    @staticmethod
    def forward(stack: Tensor, weights: Tensor) -> Tensor:
        return element_ops.fold(stack.unsqueeze(0), weights.unsqueeze(0))[0]

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *args: Tensor) -> Any:
        return element_ops.fold(*stacked(info, dims, *args)), 0


def on_stack(optimizer: Optimizer) -> Optimizer:
    """The optimizer with its update of a vector as one operator over the stack, where there is one."""
    return replace(optimizer, update=_sgd_of_vector) if optimizer.update == sgd_update else optimizer


def _sgd_of_vector(value: Tensor, grad: Tensor, buffers: Tree, numbers: Numbers) -> tuple[Tensor, Tree]:
    rates = (cast(Tensor, numbers[name]) for name in ("lr", "momentum", "weight_decay"))
    new, moved = cast(Any, _Sgd.apply(value, grad, buffers.get("momentum"), *rates))
    return new, {"momentum": moved} if buffers else {}


class StackCohort(Cohort):
    """Clients whose stack is on one device: their sum is one operator."""

    def weighted_sum(self, stack: Tensor, weights: Tensor) -> Tensor:
        total: Any = _Fold.apply(stack.reshape(len(stack), -1), weights)
        return total.reshape(stack.shape[1:])
