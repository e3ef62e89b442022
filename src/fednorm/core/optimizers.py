"""The local optimizers by name: `sgd`, `sgd(nesterov=true)`, `adam(beta2=0.99)`, `adamw`, and those of users.

They follow torch.optim to the formula, so that a user's own loop and ours agree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fednorm.core.factories import Factories
from fednorm.core.optim import Lists, Optimizer
from fednorm.core.state import Tree
from fednorm.errors import ConfigError

if TYPE_CHECKING:
    from fednorm.core.method import Numbers


@dataclass(frozen=True)
class Momentum:
    """What the settings say of momentum, for optimizers that have some: 0 means that no buffer is needed."""

    value: float


OPTIMIZERS = Factories[Optimizer](
    "optimizer", "adam(beta2=0.99)", given=Momentum, returns=Optimizer, called="fednorm.Optimizer"
)
register_optimizer = OPTIMIZERS.register
"""Make a function that returns an `Optimizer` available under a name; its keyword arguments are the options."""


@dataclass(frozen=True)
class SgdUpdate:
    """SGD, with momentum where there is a buffer for it."""

    def __call__(self, value: Tensor, grad: Tensor, buffers: Tree, numbers: Numbers) -> tuple[Tensor, Tree]:
        direction = grad + numbers["weight_decay"] * value
        if "momentum" in buffers:
            direction = numbers["momentum"] * buffers["momentum"] + direction
            buffers = {"momentum": direction}
        return value - numbers["lr"] * direction, buffers

    def together(
        self, values: list[Tensor], grads: list[Tensor], buffers: Lists, numbers: Numbers
    ) -> tuple[list[Tensor], Lists]:
        """The same of several tensors, with the same roundings in the same order."""
        lists: Any = torch  # whose calls for lists of tensors are named as if they were private
        moves = lists._foreach_mul(values, numbers["weight_decay"])
        lists._foreach_add_(moves, grads)
        if "momentum" in buffers:
            kept = lists._foreach_mul(buffers["momentum"], numbers["momentum"])
            lists._foreach_add_(kept, moves)
            buffers, moves = {"momentum": list(kept)}, kept
        return list(lists._foreach_sub(values, lists._foreach_mul(moves, numbers["lr"]))), buffers


sgd_update = SgdUpdate()


def nesterov_update(value: Tensor, grad: Tensor, buffers: Tree, numbers: Numbers) -> tuple[Tensor, Tree]:
    """SGD with Nesterov's momentum."""
    grad = grad + numbers["weight_decay"] * value
    velocity = numbers["momentum"] * buffers["momentum"] + grad
    return value - numbers["lr"] * (grad + numbers["momentum"] * velocity), {"momentum": velocity}


@dataclass(frozen=True)
class AdamUpdate:
    """Adam; `decoupled` weight decay shrinks the value itself and is AdamW's."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    decoupled: bool = False

    def __call__(self, value: Tensor, grad: Tensor, buffers: Tree, numbers: Numbers) -> tuple[Tensor, Tree]:
        lr, decay, beta1, beta2 = numbers["lr"], numbers["weight_decay"], self.beta1, self.beta2
        first, second, count = buffers["exp_avg"], buffers["exp_avg_sq"], buffers["step"]
        if self.decoupled:
            value = value * (1 - lr * decay)
        else:
            grad = grad + decay * value
        first, second, count = beta1 * first + (1 - beta1) * grad, beta2 * second + (1 - beta2) * grad**2, count + 1
        step_size = lr / (1 - beta1**count)
        value = value - step_size * first / (torch.sqrt(second) / torch.sqrt(1 - beta2**count) + self.eps)
        return value, {"exp_avg": first, "exp_avg_sq": second, "step": count}


# Adam's step is kept per element so that it has the shape of its parameter, as every other buffer.
_ADAM_BUFFERS = ("exp_avg", "exp_avg_sq", "step")
SGD = Optimizer(sgd_update, (), "sgd")
MOMENTUM_SGD = Optimizer(sgd_update, ("momentum",), "sgd")
ADAM = Optimizer(AdamUpdate(), _ADAM_BUFFERS, "adam")


@register_optimizer("sgd")
def _sgd(momentum: Momentum, nesterov: bool = False) -> Optimizer:
    if nesterov and not momentum.value:
        raise ConfigError("sgd(nesterov=true) needs momentum, and train.momentum is 0; give --momentum 0.9")
    if nesterov:
        return Optimizer(nesterov_update, ("momentum",))
    return MOMENTUM_SGD if momentum.value else SGD


@register_optimizer("adam")
def _adam(beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> Optimizer:
    return _of_adam("adam", AdamUpdate(beta1, beta2, eps))


@register_optimizer("adamw")
def _adamw(beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> Optimizer:
    return _of_adam("adamw", AdamUpdate(beta1, beta2, eps, decoupled=True))


def _of_adam(name: str, update: AdamUpdate) -> Optimizer:
    for option in ("beta1", "beta2"):
        if not 0 <= getattr(update, option) < 1:
            raise ConfigError(
                f"optimizer '{name}': {option}={getattr(update, option)} is out of range; give 0 up to below 1"
            )
    if not update.eps > 0:
        raise ConfigError(f"optimizer '{name}': eps={update.eps} is out of range; give more than 0")
    return Optimizer(update, _ADAM_BUFFERS)


def make_optimizer(text: str, momentum: float) -> Optimizer:
    """The optimizer that a training configuration names; SGD keeps a buffer only if there is momentum.

    >>> make_optimizer("adamw(beta2=0.99)", 0.9).name, make_optimizer("sgd", 0.0).buffers
    ('adamw(beta2=0.99)', ())
    """
    term, made = OPTIMIZERS.make(text, Momentum(momentum))
    return replace(made, name=str(term))


def with_nesterov(text: str) -> str:
    """The expression of an optimizer, with Nesterov's momentum.

    >>> with_nesterov("sgd")
    'sgd(nesterov=True)'
    """
    term, _ = OPTIMIZERS.make(text, Momentum(1.0))
    if term.name != "sgd":
        raise ConfigError(f"train.nesterov=true is for sgd, and train.optimizer is '{text}'; leave one of the two out")
    return str(replace(term, options={**term.options, "nesterov": True}))
