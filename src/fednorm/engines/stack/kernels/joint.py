"""What all clients of a stack do at once: the optimizer's update, and the server's weighted sum."""

# The vmap rules name their arguments, where torch's base class has *args; applying a Function has no useful type.
# pyright: reportIncompatibleMethodOverride=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from fednorm.core.optim import Optimizer
from fednorm.core.optimizers import AdamUpdate, sgd_update
from fednorm.core.reductions import Cohort
from fednorm.core.state import Tree
from fednorm.engines.stack.kernels import adam_ops, element_ops
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
        new, moved = element_ops.sgd(value.unsqueeze(0), [grad.unsqueeze(0)], one, *alone, [], [])
        return new[0], moved if velocity is None else moved[0]

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *args: Tensor | None) -> Any:
        value, grad, velocity, *numbers = stacked(info, dims, *args)
        new, moved = element_ops.sgd(value, [grad], velocity, *numbers, [], [])
        return (new, moved), (0, None if velocity is None else 0)


class _Adam(_OverStack):
    @staticmethod
    def forward(*args: Any) -> Any:
        value, grad, *alone = (each.unsqueeze(0) for each in args[:_ADAM_TENSORS])
        return tuple(each[0] for each in adam_ops.adam(value, [grad], *alone, *args[_ADAM_TENSORS:]))

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *args: Any) -> Any:
        value, grad, *others = stacked(info, dims, *args[:_ADAM_TENSORS])
        return adam_ops.adam(value, [grad], *others, *args[_ADAM_TENSORS:]), (0,) * 4


_ADAM_TENSORS = 7
"""Arguments of Adam's operator that have a row for each client; behind them come its constants."""


class _Fold(_OverStack):
    @staticmethod
    def forward(stack: Tensor, weights: Tensor) -> Tensor:
        return element_ops.fold(stack.unsqueeze(0), weights.unsqueeze(0))[0]

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *args: Tensor) -> Any:
        return element_ops.fold(*stacked(info, dims, *args)), 0


def on_stack(optimizer: Optimizer) -> Optimizer:
    """The optimizer with its update of a vector as one operator over the stack, where there is one.

    What the update is decides, not what the optimizer is called.
    """
    if optimizer.update == sgd_update:
        return replace(optimizer, update=_sgd_of_vector)
    if type(optimizer.update) is AdamUpdate:  # not one that inherits from it, and may do something else
        return replace(optimizer, update=_AdamOfVector(cast(AdamUpdate, optimizer.update)))
    return optimizer


def _sgd_of_vector(value: Tensor, grad: Tensor, buffers: Tree, numbers: Numbers) -> tuple[Tensor, Tree]:
    rates = (cast(Tensor, numbers[name]) for name in ("lr", "momentum", "weight_decay"))
    new, moved = cast(Any, _Sgd.apply(value, grad, buffers.get("momentum"), *rates))
    return new, {"momentum": moved} if buffers else {}


@dataclass(frozen=True)
class _AdamOfVector:
    update: AdamUpdate

    def __call__(self, value: Tensor, grad: Tensor, buffers: Tree, numbers: Numbers) -> tuple[Tensor, Tree]:
        rates = (cast(Tensor, numbers[name]) for name in ("lr", "weight_decay"))
        constants = self.update.beta1, self.update.beta2, self.update.eps, self.update.decoupled
        new, *kept = cast(Any, _Adam.apply(value, grad, *(buffers[name] for name in _ADAM), *rates, *constants))
        return new, dict(zip(_ADAM, kept, strict=True))


_ADAM = ("exp_avg", "exp_avg_sq", "step")


class StackCohort(Cohort):
    """Clients whose stack is on one device: their sum is one operator."""

    def weighted_sum(self, stack: Tensor, weights: Tensor) -> Tensor:
        total: Any = _Fold.apply(stack.reshape(len(stack), -1), weights)
        return total.reshape(stack.shape[1:])
