"""An adapter for models that return more than what the loss takes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fednorm.errors import ConfigError


@dataclass(frozen=True)
class Pick:
    """A forward hook that hands on one of several outputs; a plain tensor, as some models return in tests, passes."""

    which: int | str

    def __call__(self, module: nn.Module, args: object, output: Any) -> Any:
        if isinstance(output, Tensor):
            return output
        try:
            return output[self.which]
        except (KeyError, IndexError, TypeError):
            named = isinstance(output, Mapping)
            has = ", ".join(map(repr, output)) if named else f"{len(output)} of them, counted from 0"
            raise ConfigError(
                f"{type(module).__name__} has no output {self.which!r}; it returns {has}; "
                "give one of those to fednorm.output"
            ) from None


def output(model: nn.Module, which: int | str) -> nn.Module:
    """The same model, as a copy, that returns one of its outputs: a place in a tuple, or a name in a dict.

    Names of parameters stay as they are, so its files still fit.

    >>> import torch
    >>> lstm = output(nn.LSTM(3, 4, batch_first=True), 0)
    >>> lstm(torch.zeros(2, 5, 3)).shape
    torch.Size([2, 5, 4])
    """
    model = copy.deepcopy(model)
    model.register_forward_hook(Pick(which))
    return model
