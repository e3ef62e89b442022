"""Functions of a strategy as programs: what a server computes itself, version after version, in a launch each."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Hashable

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fednorm.core.state import Tree, named, unnamed
from fednorm.engines.machine import narrow_type
from fednorm.engines.stack.kernels.layers import kernels_pay, use_kernels
from fednorm.engines.stack.making_ready import making_ready
from fednorm.engines.stack.program import GraphRoom, Program
from fednorm.errors import FednormError, first_line

_MADE = "made"


class StackPrograms:
    """Programs on a device, with a model of their own whose layers are those of a stack."""

    def __init__(self, model: nn.Module, precision: str) -> None:
        self.model = copy.deepcopy(model)
        use_kernels(self.model, narrow_type(precision))
        self._programs: dict[Hashable, tuple[Program, Tree]] = {}
        self._refused = False
        self._graphs: GraphRoom | None = None

    def play(self, name: Hashable, function: Callable[[Tree], Tree], given: Tree) -> Tree | None:
        if self._refused:
            return None
        try:
            program, state = self._program(name, function, given)
            torch._foreach_copy_([state[key] for key in given], list(given.values()))  # pyright: ignore
            program()
        except FednormError:
            raise
        except Exception as error:  # of tracing, a kernel, the capture or the model: of many types
            self._refused = True
            self._programs.clear()
            why = first_line(error)
            print(f"the server computes step by step, no program could be made ({why})", file=sys.stderr)
            return None
        return unnamed(_MADE, state)

    def _program(self, name: Hashable, function: Callable[[Tree], Tree], given: Tree) -> tuple[Program, Tree]:
        shapes = tuple((key, value.shape, value.dtype) for key, value in given.items())
        if (name, shapes) not in self._programs:

            def played(state: Tree) -> Tree:
                return named(_MADE, function(state))

            with making_ready(f"what the server computes ({name})"):
                state = {key: value.clone(memory_format=torch.contiguous_format) for key, value in given.items()}
                with FakeTensorMode(allow_non_fake_inputs=True) as fake:
                    made = played({key: fake.from_tensor(value) for key, value in state.items()})
                device = next(iter(given.values())).device
                empty = {key: torch.zeros(value.shape, dtype=value.dtype, device=device) for key, value in made.items()}
                if device.type == "cuda":
                    self._graphs = self._graphs or GraphRoom()
                program = Program(lambda state: (played(state), {}), {**state, **empty}, room=self._graphs)
            self._programs[name, shapes] = program, {**state, **empty}
        return self._programs[name, shapes]


def stack_programs(model: nn.Module, device: torch.device, precision: str) -> StackPrograms | None:
    """Programs for a model on a device; None where a stack's layers would not gain by them."""
    return StackPrograms(model, precision) if kernels_pay(device, precision) else None
