"""Statistics of batch norms taken anew from data: after training, for a query, or for a client never seen before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from fednorm.core.state import Tree, is_batch_norm
from fednorm.core.step import Batch, Carry, Seen, Step, StepSpec, forward
from fednorm.layers.batch_stats import moments

if TYPE_CHECKING:
    from fednorm.core.method import Numbers

Mode = Literal["ema", "cumulative", "pooled"]
"""`ema`: torch's rule, momentum 0.1, from (0, 1); `cumulative`: the mean over batches, as torch's update_bn;
`pooled`: mean and variance of all examples together, by the law of total variance."""

_COUNT = "moments.count"


@contextmanager
def inputs_of_norms(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Collect what enters each batch norm while the model runs, by the layer's name."""
    seen: dict[str, Tensor] = {}
    hooks = []
    for name, module in model.named_modules():
        if is_batch_norm(module):

            def note(module: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
                seen[name] = args[0]

            hooks.append(module.register_forward_pre_hook(note))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class TakeMoments:
    """A step that takes the batch norms' statistics anew from the batches it is shown, in training mode, from scratch.

    Layers below use the statistics of the batch, so those of deeper layers depend on how batches are composed.
    """

    mode: Mode

    def __call__(self, spec: StepSpec) -> Step:
        def step(carry: Carry, batch: Batch, numbers: Numbers) -> tuple[Carry, Seen]:
            before = carry.extras.get(_COUNT, torch.zeros((), dtype=torch.float64, device=batch.x.device))
            # The layers move their own running statistics in place; here that must not happen to ours.
            scratch = {name: value.clone() for name, value in carry.state.items()}
            with torch.no_grad(), inputs_of_norms(spec.model) as seen:
                loss = spec.task.loss(forward(spec, carry.params | scratch, batch.x, batch.key), batch.y)
            new = dict(carry.state)
            for layer, inputs in seen.items():
                _take(new, layer, inputs, spec.model.get_submodule(layer), before, len(batch.x), self.mode)
            extras = {**carry.extras, _COUNT: before + len(batch.x)}
            return carry._replace(state=new, extras=extras), Seen(loss, {})

        return step


def std_eps(module: nn.Module) -> float:
    """What a layer that keeps a standard deviation has under its root, and so in the deviation it keeps."""
    return getattr(module, "eps", 0.0)


def _take(state: Tree, layer: str, inputs: Tensor, module: nn.Module, before: Tensor, size: int, mode: Mode) -> None:
    """Fold one batch into a layer's statistics; `before` examples were folded already."""
    prefix = f"{layer}." if layer else ""
    mean_key, var_key = f"{prefix}running_mean", f"{prefix}running_var"
    std_key, count_key = f"{prefix}running_std", f"{prefix}num_batches_tracked"
    if mean_key not in state:
        return
    start = before == 0
    old_mean = torch.where(start, 0.0, state[mean_key])
    old_var = torch.where(start, 1.0, state[var_key] if var_key in state else state[std_key].square())
    batches = torch.where(start, 0, state[count_key]) if count_key in state else None
    mean, var = moments(inputs)
    if std_key in state:
        var = var + std_eps(module)
    elif mode != "pooled":
        count = inputs.numel() // inputs.shape[1]
        var = var * (count / max(1, count - 1))
    if mode == "pooled":
        share = (size / (before + size)).to(mean.dtype)
        gap = mean - old_mean
        new_mean = old_mean + share * gap
        new_var = (1 - share) * torch.where(start, 0.0, old_var) + share * var + share * (1 - share) * gap.square()
    else:
        rate = 0.1 if mode == "ema" or batches is None else 1 / (batches + 1).to(mean.dtype)
        new_mean, new_var = old_mean + rate * (mean - old_mean), old_var + rate * (var - old_var)
    state[mean_key] = new_mean
    if var_key in state:
        state[var_key] = new_var
    else:
        state[std_key] = new_var.sqrt()
    if batches is not None:
        state[count_key] = batches + 1
