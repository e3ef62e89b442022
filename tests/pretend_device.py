"""A device that is not there: its tensors lie in the host's memory, but may not meet those of the host.

What would fail on a GPU because two tensors lie apart fails here too, without one. As a script it plays runs on it:

    python tests/pretend_device.py sequential fedavg fedbn "fedbuff(b=2)+gn"
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import tiny
from fednorm.core.state import Tree
from fednorm.engines.stack import functions, jobs, slot
from fednorm.running import plan
from fednorm.running.clock_run import run_of
from fednorm.running.on_clock import names_strategy
from fednorm.running.store import Store

_BETWEEN = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}
"""What takes numbers from one device to another."""


@cache
def device() -> torch.device:
    """Under the one name that torch has for a device of this kind."""
    backend_registration._setup_privateuseone_for_python_backend("npy")
    return torch.device("npy", 0)


class Away(Tensor):
    """A tensor of the device."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> Away:
        looks = {"strides": here.stride(), "storage_offset": here.storage_offset(), "dtype": here.dtype}
        made = Tensor._make_wrapper_subclass(cls, here.shape, **looks, device=device())  # type: ignore[attr-defined]
        made.here = here
        return made

    def __repr__(self, **_: Any) -> str:
        return f"Away({self.here})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _played(func, args, kwargs or {})


class _Placed(TorchDispatchMode):
    """New tensors that are asked for there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _played(func, args, kwargs or {})


class _Crossing(TorchFunctionMode):
    """What torch does between numbers of the host and tensors there without asking an operator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor:
            place = kwargs.pop("device", None)
            made = func(*args, **kwargs)
            return made if place is None else made.to(place)
        if func is Tensor.new_tensor:
            return torch.tensor(*args[1:], dtype=args[0].dtype).to(args[0].device)
        if func is Tensor.tolist:
            return func(args[0].cpu())
        if func in (Tensor.data_ptr, Tensor.untyped_storage) and isinstance(args[0], Away):
            return func(args[0].here)
        return func(*args, **kwargs)


def _played(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operator on the host, for tensors that lie together."""
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    traced = next((each for each in tensors if isinstance(each, FakeTensor)), None)
    if traced is not None:  # without numbers; where it lies torch looks itself
        with traced.fake_mode:
            return func(*tree_map_only(Away, _without_numbers, args), **tree_map_only(Away, _without_numbers, kwargs))
    away = [each for each in tensors if isinstance(each, Away)]
    if away and func not in _BETWEEN and any(each.dim() for each in tensors if not isinstance(each, Away)):
        raise RuntimeError(f"{func} of tensors that lie apart: {[(each.device.type, each.shape) for each in tensors]}")
    asked = kwargs.get("device")
    if asked is not None:
        goes = torch.device(asked).type == device().type
        kwargs = {**kwargs, "device": torch.device("cpu")}
    else:
        goes = isinstance(args[0], Away) if func is torch.ops.aten.copy_.default else bool(away)
    args, kwargs = tree_map_only(Away, lambda each: each.here, (args, kwargs))
    result = func(*args, **kwargs)
    if not goes:
        return result
    known = {id(each.here): each for each in away}  # what was changed in place

    def taken(each: Tensor) -> Tensor:
        return known[id(each)] if id(each) in known else each if isinstance(each, Away) else Away(each)

    return tree_map_only(Tensor, taken, result)


def _without_numbers(tensor: Away) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


@contextmanager
def pretending() -> Iterator[torch.device]:
    """Within, there is the device."""
    # Without threads of torch's own for it, which would outlive it.
    with _Placed(), _Crossing(), torch.autograd.set_multithreading_enabled(False):
        yield device()


def ended(expression: str, engine: str) -> tuple[Tree, list[dict[str, Any]]]:
    """The server's tree after a short run, on the host, and what was scored; on a clock until updates are stale."""
    length = {"rounds": 6, "clock__concurrency": 3} if names_strategy(expression) else {"rounds": 2}
    settings: dict[str, Any] = {"engine__name": engine, "train__augment": "crop(1)+flip", **length}
    run = run_of(tiny.plan(expression, **settings), Store())
    rows = [dict(row["eval"]) for row in run.rounds() if "eval" in row]
    return {key: value.cpu() for key, value in run.server.tree.items()}, rows


def main() -> None:
    engine, *expressions = sys.argv[1:]
    for expression in expressions:
        expected, scores = ended(expression, engine)
        with pretending() as place, ExitStack() as patches:
            patches.enter_context(patch.object(plan, "find_device", lambda _: place))
            for module in (slot, jobs):  # rounds and jobs that stay there, traced
                patches.enter_context(patch.object(module, "DEVICES", {place.type}))
            patches.enter_context(patch.object(functions, "kernels_pay", lambda *_: True))  # and what a server computes
            found, same = ended(expression, engine)
        far = max(float((found[key].double() - value.double()).abs().max()) for key, value in expected.items())
        assert far < 1e-9, f"{expression}: {far}"
        assert len(scores) == len(same)
        print(f"{expression}: equal", flush=True)
    os._exit(0)  # torch has threads for such a device, which it cannot end


if __name__ == "__main__":
    main()
