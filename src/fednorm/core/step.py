"""One client's step, written once: the sequential engine calls it, the stacked engine maps it over clients.

A step is a pure function of tensors, with one exception that torch's own layers force on us: running statistics and
counters are updated in place in the tree they are passed in, which therefore must be the client's own copy.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.jit import ScriptModule

from fednorm.core.probe import Probe
from fednorm.core.state import Kind, Tree, is_batch_norm
from fednorm.core.task import AnyTask

if TYPE_CHECKING:
    from fednorm.core.method import Facts, Numbers, Rule
    from fednorm.core.optim import Stepping


class Carry(NamedTuple):
    """A client in the middle of its work, or with a leading axis a stack of clients: what a step passes on."""

    params: Tree
    """what is trained"""
    state: Tree
    """the rest of the model's state: statistics, counters, buffers, parameters that are held"""
    optimizer: Tree
    """the optimizer's buffers"""
    extras: Tree
    """entries that the method declares for itself"""
    anchor: Tree
    """the parameters as the client began with them"""

    @property
    def tree(self) -> Tree:
        """All entries that a client may send or keep."""
        return {**self.params, **self.state, **self.optimizer, **self.extras}


class Batch(NamedTuple):
    """Examples, and the key that serves the random layers of the model."""

    x: Tensor
    y: Tensor
    key: Tensor


class Seen(NamedTuple):
    """What a step tells of itself: the loss without penalty terms, and what probes saw."""

    loss: Tensor
    probed: Tree


Step = Callable[[Carry, Batch, "Numbers"], tuple[Carry, Seen]]

Objective = Callable[[Tree, Carry, Batch, "Numbers"], tuple[Tensor, Tensor]]
"""(parameters, client, batch, numbers) -> (what is minimised, the loss without penalty terms)."""

Places = dict[str, tuple[dict[str, Tensor | None], str]]
"""By key, the dictionary of a model's layer that holds a tensor, and its name there."""

Gradients = Callable[[Tree, Carry, Batch, "Numbers"], tuple[Tree, tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class StepSpec:
    """Everything static that a step is made from."""

    model: nn.Module
    facts: Facts
    rule: Rule
    optimizer: Stepping
    task: AnyTask
    tied: bool = True
    """Whether the model may have tensors with several names, which takes time to look for in every step."""
    keyed: tuple[str, ...] = ()
    """Names of the key buffers of layers that draw random numbers."""
    drawing: Callable[[Tensor], AbstractContextManager[object]] | None = None
    """Where the model's own code draws from torch's hidden generator: a context in which it draws from a key."""
    factors: Mapping[str, float] = field(default_factory=dict[str, float])
    """Factors on the learning rate, for the keys that have one."""
    spared: frozenset[str] = frozenset()
    """Keys that weight decay leaves alone."""
    probes: tuple[Probe, ...] = ()
    differentiate: Callable[[Objective], Gradients] | None = None

    @cached_property
    def places(self) -> Places | None:
        """Where the model holds its tensors, by key; None where only `functional_call` can put others there."""
        if self.tied or self.differentiate or any(isinstance(each, ScriptModule) for each in self.model.modules()):
            return None
        found: Places = {}
        for prefix, module in cast("Iterable[tuple[str, nn.Module]]", self.model.named_modules()):
            for what in ("_parameters", "_buffers"):
                held: dict[str, Tensor | None] = vars(module)[what]
                found |= {f"{prefix}.{name}" if prefix else name: (held, name) for name in held}
        return found


StepMaker = Callable[[StepSpec], Step]


def forward(spec: StepSpec, state: Tree, x: Tensor, key: Tensor) -> Any:
    """The model's output with `state` as its state and `key` for every layer that draws random numbers."""
    given = state | dict.fromkeys(spec.keyed, key)
    with spec.drawing(key) if spec.drawing else nullcontext():
        if spec.places is not None and given.keys() <= spec.places.keys():
            with _swapped(spec.places, given):
                return spec.model(x)
        return functional_call(spec.model, given, (x,), tie_weights=spec.tied)


@contextmanager
def _swapped(places: Places, given: Tree) -> Generator[None]:
    """What `functional_call` does, without looking for the places anew in every step."""
    own = [(*places[key], value) for key, value in given.items()]
    before = [held[name] for held, name, _ in own]
    for held, name, value in own:
        held[name] = value
    try:
        yield
    finally:
        for (held, name, _), value in zip(own, before, strict=True):
            held[name] = value


def by_autograd(objective: Objective) -> Gradients:
    """Gradients with plain autograd, which is a quarter faster than `torch.func.grad` on small CPU models."""

    def run(params: Tree, carry: Carry, batch: Batch, numbers: Numbers) -> tuple[Tree, tuple[Tensor, Tensor]]:
        leaves = {key: value.detach().requires_grad_() for key, value in params.items()}
        with torch.enable_grad():
            total, loss = objective(leaves, carry, batch, numbers)
            # A parameter the output does not depend on has no gradient; its step is weight decay alone.
            grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(leaves, grads, strict=True)), (total.detach(), loss)

    return run


def _copied(carry: Carry) -> Carry:
    return carry._replace(state={key: value.clone() for key, value in carry.state.items()})


@dataclass(frozen=True)
class TrainStep:
    """A step of local training: loss and penalties, gradient transforms, update."""

    def __call__(self, spec: StepSpec) -> Step:
        rule = spec.rule

        def objective(params: Tree, carry: Carry, batch: Batch, numbers: Numbers) -> tuple[Tensor, Tensor]:
            loss = spec.task.loss(forward(spec, params | carry.state, batch.x, batch.key), batch.y)
            total = loss
            for penalty in rule.losses:
                total = total + penalty(carry._replace(params=params), numbers)
            return total, loss.detach()

        gradients = (spec.differentiate or by_autograd)(objective)
        looks = {probe.name: probe.see for probe in spec.probes if probe.see is not None}

        def step(carry: Carry, batch: Batch, numbers: Numbers) -> tuple[Carry, Seen]:
            # Layers move their statistics in place: who is to see those from before must have a copy.
            before = _copied(carry) if looks else carry
            grads, (_, loss) = gradients(carry.params, carry, batch, numbers)
            for transform in rule.grads:
                grads = transform(grads, carry, numbers, spec.facts)
            params, buffers = spec.optimizer.step(
                carry.params, grads, carry.optimizer, numbers, spec.factors, spec.spared
            )
            after = carry._replace(params=params, optimizer=buffers)
            probed = {name: see(grads, before, after, spec.facts) for name, see in looks.items()}
            return after, Seen(loss, probed)

        return step


@dataclass(frozen=True)
class ObserveStep:
    """A step that only looks: a training-mode forward pass moves the running statistics, nothing is learned."""

    def __call__(self, spec: StepSpec) -> Step:
        def step(carry: Carry, batch: Batch, numbers: Numbers) -> tuple[Carry, Seen]:
            with torch.no_grad():
                loss = spec.task.loss(forward(spec, carry.params | carry.state, batch.x, batch.key), batch.y)
            return carry, Seen(loss, {})

        return step


@contextmanager
def training_mode(model: nn.Module, hold: frozenset[Kind]) -> Generator[None]:
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
