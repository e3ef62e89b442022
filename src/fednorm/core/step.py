"""One client's step, written once: the sequential engine calls it, the stacked engine maps it over clients.

A step is a pure function of tensors, with one exception that torch's own layers force on us: running statistics and
counters are updated in place in the tree they are passed in, which therefore must be the client's own copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fednorm.core.state import Kind, Tree, is_batch_norm

if TYPE_CHECKING:
    from fednorm.core.method import Facts, Numbers, Rule
    from fednorm.core.optim import Optimizer
    from fednorm.scoring.probes import Probe
    from fednorm.scoring.tasks import Task


class StepOut(NamedTuple):
    """What a step leaves: the new trees, the loss without penalty terms, and what the probes saw."""

    params: Tree
    rest: Tree
    buffers: Tree
    loss: Tensor
    seen: Tree


Step = Callable[[Tree, Tree, Tree, Tree, Tensor, Tensor, Tensor, "Numbers"], StepOut]
"""(trained parameters, rest of the state, optimizer buffers, broadcast parameters, x, y, key, numbers) -> StepOut."""

Objective = Callable[..., tuple[Tensor, tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class StepSpec:
    """Everything static that a step is made from."""

    model: nn.Module
    facts: Facts
    rule: Rule
    optimizer: Optimizer
    task: Task
    tied: bool = True
    """Whether the model may have tensors with several names, which takes time to look for in every step."""
    keyed: tuple[str, ...] = ()
    """Names of the key buffers of layers that draw random numbers."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """Factors on the learning rate, for the keys that have one."""
    spared: frozenset[str] = frozenset()
    """Keys that weight decay leaves alone."""
    probes: tuple[Probe, ...] = ()
    differentiate: Callable[[Objective], Callable[..., tuple[Tree, tuple[Tensor, tuple[Tensor, Tensor]]]]] | None = None


StepMaker = Callable[[StepSpec], Step]


def forward(spec: StepSpec, state: Tree, x: Tensor, key: Tensor) -> Any:
    """The model's output with `state` as its state and `key` for every layer that draws random numbers."""
    return functional_call(spec.model, state | dict.fromkeys(spec.keyed, key), (x,), tie_weights=spec.tied)


def by_autograd(objective: Objective) -> Callable[..., tuple[Tree, tuple[Tensor, tuple[Tensor, Tensor]]]]:
    """Gradients with plain autograd, which is a quarter faster than `torch.func.grad` on small CPU models."""

    def run(params: Tree, *rest: Any) -> tuple[Tree, tuple[Tensor, tuple[Tensor, Tensor]]]:
        leaves = {key: value.detach().requires_grad_() for key, value in params.items()}
        with torch.enable_grad():
            total, aux = objective(leaves, *rest)
            # A parameter the output does not depend on has no gradient; its step is weight decay alone.
            grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(leaves, grads, strict=True)), (total.detach(), aux)

    return run


def train_step(spec: StepSpec) -> Step:
    """A step of local training: loss and penalties, gradient transforms, update."""
    rule = spec.rule

    def objective(params: Tree, rest: Tree, anchor: Tree, x: Tensor, y: Tensor, key: Tensor, numbers: Numbers):
        output = forward(spec, params | rest, x, key)
        loss = spec.task.loss(output, y)
        total = loss
        for term in rule.losses:
            total = total + term(params, anchor, numbers)
        return total, (loss.detach(), output.detach())

    differentiate = (spec.differentiate or by_autograd)(objective)

    def step(
        params: Tree, rest: Tree, buffers: Tree, anchor: Tree, x: Tensor, y: Tensor, key: Tensor, numbers: Numbers
    ) -> StepOut:
        grads, (_, (loss, _)) = differentiate(params, rest, anchor, x, y, key, numbers)
        for transform in rule.grads:
            grads = transform(grads, params, numbers, spec.facts)
        new, buffers = spec.optimizer.update(params, grads, buffers, numbers, spec.factors, spec.spared)
        seen = {probe.name: probe.see(grads, params, new, anchor, rest, spec.facts) for probe in spec.probes}
        return StepOut(new, rest, buffers, loss, seen)

    return step


def observe_step(spec: StepSpec) -> Step:
    """A step that only looks: a training-mode forward pass moves the running statistics, nothing is learned."""

    def step(
        params: Tree, rest: Tree, buffers: Tree, anchor: Tree, x: Tensor, y: Tensor, key: Tensor, numbers: Numbers
    ) -> StepOut:
        with torch.no_grad():
            loss = spec.task.loss(forward(spec, params | rest, x, key), y)
        return StepOut(params, rest, buffers, loss, {})

    return step


@contextmanager
def training_mode(model: nn.Module, hold: frozenset[Kind]) -> Iterator[None]:
    """Training mode, in which batch norms whose statistics are held use their running statistics and keep them.

    Only batch norms go to evaluation mode, dropout does not; and it is done after `train()`, which would undo it.
    """
    model.train()
    if Kind.STATISTIC in hold:
        for module in model.modules():
            if is_batch_norm(module):
                module.eval()
    try:
        yield
    finally:
        model.eval()
