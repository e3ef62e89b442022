"""Kernels of whole models compiled for a GPU that is not here: Triton's compiler needs none, only its launches do.

As a script it prints what each kernel of a model's round takes of a processor, and how many launches a step is:

    PYTHONPATH=.triton python tests/kernel_builds.py [--models resnet20+gn,mobilenet_v2:5] [--arch 90] [--wide]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch.fx import GraphModule, Interpreter
from torch.profiler import ProfilerActivity, profile
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from fednorm.bench.cases import Case, labels_of, read_cases
from fednorm.bench.gpu import config_of
from fednorm.bench.pools import random_images
from fednorm.core.state import Tree
from fednorm.engines.stack import phase_program, program, slot
from fednorm.engines.stack.fusion import fuse
from fednorm.engines.stack.in_place import write_in_place
from fednorm.engines.stack.kernels import boxes, launch, ops
from fednorm.engines.stack.kernels.layers import use_kernels
from fednorm.engines.stack.program import Program, TensorSpec, compile_kernels
from fednorm.engines.stack.rounding import Rounded
from fednorm.engines.stack.tracing import trace
from fednorm.errors import DivergedError
from fednorm.running.config import updated
from fednorm.running.plan import make_plan
from fednorm.running.run import Run
from fednorm.running.store import Store

IMAGES = 40
"""of a client: two batches"""


@dataclass(frozen=True)
class Built:
    """A kernel that was compiled."""

    module: str
    name: str
    options: str
    shared: int
    """bytes of shared memory of a program"""
    warps: int
    binary: bytes

    def usage(self) -> tuple[int, int]:
        """Registers of a thread, and bytes of what had no room in them."""
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(self.binary)
            shown = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        found = re.search(r"REG:(\d+) STACK:(\d+)", shown)
        assert found
        return int(found[1]), int(found[2])


class _Absent:
    """Triton's driver of a GPU of some architecture, as far as compiling asks for one."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        return f"sm_{self._target.arch}"  # what was compiled for it is kept apart from what a real one has

    def get_current_stream(self, device: str) -> int:
        return 0


@contextmanager
def building(arch: int) -> Iterator[tuple[dict[str, Built], list[Exception]]]:
    """Compile kernels for an architecture where they would be launched; what was built, and what went wrong."""
    built: dict[str, Built] = {}
    failed: list[Exception] = []

    def build(self: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def call(*args: Any, **named: Any) -> None:
            try:
                found = self._jitted.run(*args, grid=grid, warmup=True, enable_fp_fusion=True, **named)
            except Exception as error:
                failed.append(error)
                raise
            if found.hash not in built:
                options = " ".join(f"{key}={value}" for key, value in named.items() if key.isupper())
                of = found.metadata
                module = self._jitted.fn.__module__
                built[found.hash] = Built(module, found.name, options, of.shared, of.num_warps, found.asm["cubin"])

        return call

    driver.set_active(_Absent(arch))  # type: ignore[arg-type]
    try:
        with ExitStack() as patches:
            # Operators choose kernels, as on a GPU.
            patches.enter_context(patch.object(ops, "_TYPES", (torch.float32, torch.bfloat16)))
            patches.enter_context(patch.object(ops, "kernels_run", lambda device: True))
            # One kernel after the other: Python's parser, which Triton asks, may fail in several threads.
            patches.enter_context(patch.object(program, "_COMPILERS", 1))
            patches.enter_context(patch.object(launch.Kernel, "__getitem__", build))
            # What fails here says nothing about others.
            patches.enter_context(patch.object(boxes, "_GIVEN_UP", Event()))
            yield built, failed
    finally:
        driver._active = None  # the next to ask finds the machine's own, if it has one


def programs(case: Case, clients: int, wide: bool = False, **settings: object) -> list[GraphModule]:
    """The programs of a model's round, fused, for activations in bfloat16 or float32: start, step and merge.

    Call it inside `building`, where operators choose kernels, as on a GPU.
    """
    found: list[GraphModule] = []

    class Noted(Program):
        """A program that is written down and never played."""

        def __init__(self, function: Callable[[Tree], Any], state: Tree, *_: object) -> None:
            found.append(fuse(trace(function, state)))
            Rounded(found[-1], state, write_in_place(found[-1], state))

        def __call__(self, anew: bool = True) -> None:
            pass

    data = random_images(clients, IMAGES, shape=(3, case.pixels, case.pixels), labels=labels_of(case))
    config = config_of(case.model, "stacked", "fp32", torch.device("cpu"), local_steps=3)
    plan = make_plan(updated(config, {"method": case.method, **settings}), federation=data)
    use_kernels(plan.prepared.model, None if wide else torch.bfloat16)
    stays = patch.object(slot, "DEVICES", {"cpu"})
    # Nothing is played, so what is reported of the round is empty.
    with stays, patch.object(phase_program, "Program", Noted), suppress(DivergedError):
        next(iter(Run(plan, Store()).rounds()))
    return found


def launches(graph: GraphModule) -> Counter[str]:
    """What a program would launch on a GPU: our kernels by name, torch's own by operator. Call it inside `building`."""
    found: Counter[str] = Counter()

    def count(self: launch.Kernel, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **named: found.update([self._jitted.fn.__name__])

    given = [TensorSpec.of(node.meta["val"]).zeros() for node in graph.graph.nodes if node.op == "placeholder"]
    kernels = patch.object(launch.Kernel, "__getitem__", count)
    with kernels, torch.no_grad(), profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        Interpreter(graph).run(*given, enable_io_processing=False)
    for event in seen.events() or ():
        if _is_work(event) and not any(map(_is_work, _parents(event))):
            found[event.name] += 1
    return found


def _is_work(event: Any) -> bool:
    """Whether torch computes or copies numbers here, which views and new tensors do not."""
    name = event.name.removeprefix("aten::")
    if name == event.name or name.startswith(("empty", "new_empty")):
        return False
    packet = getattr(torch.ops.aten, name)
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    # One that may return a view calls another where it cannot.
    may_be_view = any(out.alias_info and not out.alias_info.is_write for each in schemas for out in each.returns)
    return not may_be_view and name not in {"detach_", "mT"}


def _parents(event: Any) -> Iterator[Any]:
    while (event := event.cpu_parent) is not None:
        yield event


def main() -> None:
    parser = argparse.ArgumentParser(description="What each kernel of a model's round takes of a GPU's processor.")
    parser.add_argument("--models", default="resnet20", help="as fednorm bench models takes them")
    parser.add_argument("--arch", type=int, default=90, help="compute capability: 90 is an H200, 86 an RTX 3090")
    parser.add_argument("--wide", action="store_true", help="activations in float32 (tf32) in place of bfloat16")
    asked = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = asked.wide
    for case in read_cases(asked.models, (5,)):
        for clients in case.clients:
            print(f"{case.name}, {clients} clients")
            with building(asked.arch) as (kernels, failed):
                graphs = programs(case, clients, asked.wide)
                for graph in graphs:
                    with compile_kernels(graph):
                        pass
                step = launches(graphs[1])
            for each in kernels.values():
                registers, spilled = each.usage()
                of = f"{registers:3} registers {spilled:4} spilled {each.shared:6} shared {each.warps:2} warps"
                print(f"  {each.name:20} {of}  {each.options}")
            print(f"  {step.total()} launches a step: {dict(step.most_common())}")
            for error in failed:
                print(f"  failed: {error}")


if __name__ == "__main__":
    main()
