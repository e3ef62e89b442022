"""What a model does when it runs and its layers' types do not tell: found out once, on two examples of the data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]

from fednorm.core import rng
from fednorm.core.state import model_state
from fednorm.core.step import training_mode
from fednorm.errors import ConfigError, FednormError
from fednorm.layers.stand_ins import StandIns

if TYPE_CHECKING:
    from fednorm.halves.site import Sites

_CALL_MORE = (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase, nn.RReLU, nn.EmbeddingBag, _DropoutNd)
"""Torch's layers that may call functions with a stand-in."""


@dataclass(frozen=True)
class Habits:
    """What was seen; a model of layers that are all known has none."""

    draws: bool = False
    """It calls functions that draw random numbers."""
    special: bool = False
    """It calls functions that need a stand-in where clients are stacked."""
    counts: str = ""
    """A number that a module of it changes in plain Python, by name; a program on a device would freeze it."""

    def drawing(self, mapped: bool) -> Callable[[Tensor], StandIns] | None:
        """The context of a forward pass with a key, where one is needed; `mapped` for a stack of clients."""
        if not (self.special if mapped else self.draws):
            return None
        return lambda key: StandIns(key, mapped)


NO_HABITS = Habits()


def find_habits(sites: Sites) -> Habits:
    """Let a copy of the model run once as in training, on two examples; refuse an output that the task cannot take."""
    if not any(_is_foreign(module) for module in _modules(sites.prepared.model)):
        return NO_HABITS
    batches = sites.batches
    rows, key = batches.rows_and_key(batches.pool.clients[0], 0)
    x, y = batches.take(rows[:2], key)
    model = copy.deepcopy(sites.prepared.model)
    before = _numbers(model)
    watch = StandIns(rng.key(0).to(x.device))
    with training_mode(model, frozenset()), torch.random.fork_rng(devices=[]), torch.no_grad():  # pyright: ignore[reportUnknownMemberType]
        try:
            with watch:
                output: Any = functional_call(model, model_state(model), (x,))
        except FednormError:
            raise
        except Exception:  # whatever it is, it comes again in the first step, where it is told
            return Habits(draws=True, special=True)
        if not isinstance(output, Tensor):
            _try_loss(sites, output, y)
    changed = [name for name, number in _numbers(model).items() if before.get(name, number) != number]
    return Habits(draws=watch.drawn > 0, special=watch.met, counts=changed[0] if changed else "")


def _modules(model: nn.Module) -> Iterable[nn.Module]:
    return model.modules()


def _is_foreign(module: nn.Module) -> bool:
    """Whether a module may do what its type does not tell: it is neither torch's nor ours, or has hooks."""
    both = (vars(module)["_forward_hooks"], vars(module)["_forward_pre_hooks"])
    hooks = [hook for hooks in cast(tuple[dict[int, object], ...], both) for hook in hooks.values()]
    homes = [type(module).__module__, *(getattr(hook, "__module__", "") for hook in hooks)]
    known = all(home.startswith(("torch.nn.modules.", "fednorm.")) for home in homes)
    return not known or isinstance(module, _CALL_MORE)


def _numbers(model: nn.Module) -> dict[str, float]:
    """Numbers that modules hold as plain attributes; the keyed layers' count of calls is started anew by the model."""
    return {
        f"{name}.{attribute}".removeprefix("."): value
        for name, module in cast(Iterable[tuple[str, nn.Module]], model.named_modules())
        if _is_foreign(module)
        for attribute, value in vars(module).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _try_loss(sites: Sites, output: Any, y: Tensor) -> None:
    """A task of the user's own may take any structure; what the loss does not take is refused with the way out."""
    try:
        sites.task.loss(output, y)
    except Exception:
        takes = f"of which {sites.task.name} takes one; say which: fednorm.output(model, "
        if isinstance(output, Mapping):
            names = [str(name) for name in cast(Mapping[Any, Any], output)]
            chosen = "logits" if "logits" in names else names[0]
            what = f"a dict with {', '.join(map(repr, names))}, {takes}{chosen!r})"
        elif isinstance(output, tuple | list):
            outputs = cast(tuple[Any, ...], output)
            what = f"a {type(outputs).__name__} of {len(outputs)}, {takes}0)"
        else:
            kind = type(output).__name__
            what = f"a {kind}, which {sites.task.name} does not take; return a tensor, or a tuple or dict of tensors"
        raise ConfigError(f"the model ({type(sites.prepared.model).__name__}) returns {what}") from None
