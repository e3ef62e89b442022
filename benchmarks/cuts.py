"""How long each layer's kernels take on a GPU as they are cut now, and with other cuts beside them.

    python benchmarks/cuts.py --models resnet18:20,digit_cnn:5 --out cuts.json

A model's programs are made ready as for a run. Every operator of its training step is then called alone, with random
numbers, as it is cut now and with each candidate that has another cut for it, in turn. Inputs take turns too, so that
none is found in the cache. What is worth it goes into `engines/stack/kernels/tiles.py` and beside the kernels by hand.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves, tree_map_only

from fednorm.bench.cases import TABLE, Case, read_cases
from fednorm.bench.machine import describe_machine
from fednorm.bench.models import stacked
from fednorm.bench.options import Options
from fednorm.bench.plain_steps import captured
from fednorm.bench.timing import Effort
from fednorm.engines.machine import find_device, precision
from fednorm.engines.stack import program
from fednorm.engines.stack.kernels import ops, tiles
from fednorm.engines.stack.kernels.tiles import Tile, conv_tile, power_of_2, weight_tile
from fednorm.engines.stack.program import TensorSpec
from fednorm.errors import FednormError, first_line
from fednorm.files import write_json

KERNELS = "fednorm.engines.stack.kernels"
CACHE = 200 << 20
"""Bytes of inputs that take turns, more than a GPU's cache holds."""
MOST_COPIES, PLAYS, TURNS = 8, 4, 3
Patches = tuple[tuple[str, str, Any], ...]
"""Module, name and what is there instead."""


@dataclass(frozen=True)
class Candidate:
    """Another way to cut the kernels of some operators."""

    operators: tuple[str, ...]
    patches: Patches


WEIGHT_TILES = (  # terms, outs, warps, stages
    (128, 128, 8, 3), (128, 128, 8, 4), (128, 128, 4, 3), (128, 64, 4, 3), (128, 64, 4, 4), (64, 128, 4, 4),
    (64, 64, 4, 5), (128, 256, 8, 3),
)  # fmt: skip
CONV_TILES = (  # pixels, outs, warps, stages
    (256, 64, 8, 3), (256, 64, 4, 3), (128, 128, 8, 3), (128, 128, 8, 4), (256, 128, 8, 3), (128, 64, 4, 4),
    (128, 256, 8, 3),
)  # fmt: skip
CONVS = ("conv", "conv_moments", "conv_input_grad", "conv_weight_grad_parts")
LINEAR_TILES = ((16, 64, 4), (32, 64, 16), (16, 32, 4), (16, 128, 16), (32, 32, 8))  # outs, ins, warps
NORM_CUTS = (
    ("_MOST_TILES", 1), ("_ENOUGH", 264), ("_ENOUGH", 1056), ("_ELEMENTS", 4096), ("_ELEMENTS", 16384),
    ("_MOST_JOINED", 1024), ("_MOST_JOINED", 2048), ("_MOST_JOINED", 8192),
)  # fmt: skip


def _weight(terms: int, outs: int, warps: int, stages: int) -> Candidate:
    """Filters' gradients with other tiles; no tile is larger than what there is."""

    def tile(ins: int, channels: int, taps: int, wide: bool) -> tuple[Tile, int]:
        found, programs = weight_tile(ins, channels, taps, wide)
        most, block = (max(16, power_of_2(number)) for number in (taps * ins, channels))
        return Tile(found.pixels, min(outs, block), min(terms, most), warps, stages), programs

    return Candidate(("conv_weight_grad_parts",), ((tiles.__name__, "weight_tile", tile),))


def _conv(pixels: int, outs: int, warps: int, stages: int) -> Candidate:
    def tile(ins: int, channels: int, taps: int, *of: Any) -> Tile:
        found = conv_tile(ins, channels, taps, *of)
        return Tile(pixels, min(outs, max(16, power_of_2(channels))), found.terms, warps, stages)

    return Candidate(("conv", "conv_moments", "conv_input_grad"), ((f"{KERNELS}.conv", "conv_tile", tile),))


def _candidates() -> dict[str, Candidate]:
    """By name; some do not fit some layers, which is then left out."""
    from fednorm.engines.stack.kernels import boxes, norm, sgd

    def named(what: str, tile: Sequence[int]) -> str:
        return f"{what} {tile[0]}x{tile[1]}, {tile[2]} warps" + (f", {tile[3]} stages" if len(tile) > 3 else "")

    found = {"no boxes": Candidate(CONVS, ((boxes.__name__, "_fetches", lambda: False),))}
    found |= {named("weight", tile): _weight(*tile) for tile in WEIGHT_TILES}
    found |= {named("conv", tile): _conv(*tile) for tile in CONV_TILES}
    for name, value in NORM_CUTS:
        found[f"norm {name} {value}"] = Candidate(("norm", "norm_grad"), ((norm.__name__, name, value),))
    for tile in LINEAR_TILES:
        patches = zip(("_OUTS", "_INS", "_WARPS"), tile, strict=True)
        found[named("linear", tile)] = Candidate(
            ("sgd_in_place",), tuple((sgd.__name__, name, value) for name, value in patches)
        )
    return found


@dataclass(frozen=True)
class Call:
    """An operator of a step, on tensors of some kind, and how often it is there."""

    target: Any
    specs: Any
    times: int

    @property
    def name(self) -> str:
        return str(self.target).split(".")[1]

    @property
    def told(self) -> str:
        shapes = [list(spec.shape) for spec in tree_leaves(self.specs) if isinstance(spec, TensorSpec)]
        return f"{self.name} {shapes[:2]} x{self.times}"

    def inputs(self) -> list[Any]:
        """Arguments with random numbers, as many as do not fit into the cache."""
        specs = [spec for spec in tree_leaves(self.specs) if isinstance(spec, TensorSpec)]
        size = sum(spec.dtype.itemsize * math.prod(spec.shape) for spec in specs)
        copies = max(1, min(MOST_COPIES, CACHE // max(size, 1)))
        return [tree_map_only(TensorSpec, _random, self.specs) for _ in range(copies)]


def _random(spec: TensorSpec) -> Tensor:
    """Between a half and one and a half, so that it may be a variance or a rate; labels are 0."""
    made = spec.zeros()
    return made.uniform_(0.5, 1.5) if spec.dtype.is_floating_point else made


def calls_of(case: Case, clients: int, options: Options) -> list[Call]:
    """The operators of ours in a case's training step."""
    graphs: list[GraphModule] = []
    original = program.compile_kernels

    def note(traced: GraphModule) -> AbstractContextManager[None]:
        graphs.append(traced)
        return original(traced)

    with patch.object(program, "compile_kernels", note):
        steps = stacked(case, clients, options.precision or "bf16", options)
        steps(0.0)
        assert steps.rounds is not None
        steps.rounds.close()
    step = max(graphs, key=lambda graph: len(graph.graph.nodes))
    found = program.calls_of(step)
    times = Counter(map(repr, found))
    return [Call(*each, times[text]) for text, each in {repr(each): each for each in found}.items()]


@contextmanager
def patched(patches: Patches) -> Iterator[None]:
    with ExitStack() as stack:
        for module, name, value in patches:
            stack.enter_context(patch(f"{module}.{name}", value))
        yield


def milliseconds(call: Call, inputs: list[Any]) -> Callable[[], float]:
    """Something that times a call, captured with all its inputs one after the other."""

    def play() -> None:
        for args, kwargs in inputs:
            call.target(*args, **kwargs)

    replay = captured(play)

    def timed() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(PLAYS):
            replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / PLAYS / len(inputs)

    timed()
    return timed


def compared(call: Call, candidates: Mapping[str, Candidate]) -> dict[str, float]:
    """Microseconds of a call by candidate, in turn; those that do not work are left out."""
    inputs = call.inputs()
    timers: dict[str, Callable[[], float]] = {}
    for name, each in {"as it is": Candidate((), ()), **candidates}.items():
        if not each.operators or call.name in each.operators:
            with suppress(Exception), patched(each.patches):  # Triton has errors of many types
                timers[name] = milliseconds(call, inputs)
    times: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(TURNS):
        for name, timer in timers.items():
            times[name].append(timer())
    return {name: 1e3 * statistics.median(each) for name, each in times.items()}


def compile_all(calls: list[Call], candidates: Mapping[str, Candidate]) -> None:
    """Let the kernels of all candidates be compiled, many at a time."""
    for each in candidates.values():
        mine = [call for call in calls if call.name in each.operators]

        def play(call: Call) -> None:
            with suppress(Exception), torch.no_grad():
                args, kwargs = tree_map_only(TensorSpec, _random, call.specs)
                call.target(*args, **kwargs)

        with patched(each.patches), ThreadPoolExecutor(16) as pool:
            list(pool.map(play, mine))
        torch.cuda.empty_cache()


def show(told: str, found: dict[str, float], times: int) -> None:
    base = found.get("as it is", float("nan"))
    best = sorted(found, key=lambda name: found[name])[:4]
    print(f"{told}: {base:.1f} us, {base * times:.0f} in a step", flush=True)
    for name in best:
        if name != "as it is":
            print(f"    {found[name]:8.1f}  {found[name] / base:5.2f}  {name}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=TABLE, help="as fednorm bench models takes them")
    parser.add_argument("--only", default="", metavar="LIST", help="operators, such as norm,norm_grad; default: all")
    parser.add_argument("--out", type=Path, metavar="FILE")
    asked = parser.parse_args()
    if not (torch.cuda.is_available() and ops.HAS_TRITON):
        parser.error("a GPU and Triton are needed to time kernels; there are none here")
    device, candidates = find_device("cuda"), _candidates()
    cases = read_cases(asked.models, (5,))
    options = Options(sections=("models",), device=device, effort=Effort(), cases=cases, precision="bf16")
    result: dict[str, Any] = {"benchmark": "cuts", **describe_machine(device), "us": {}}
    only = set(filter(None, asked.only.split(",")))
    for case in cases:
        for clients in case.clients:
            name = f"{case.name}:{clients}"
            try:
                calls = [call for call in calls_of(case, clients, options) if not only or call.name in only]
            except (RuntimeError, FednormError) as error:
                print(f"{name} left out: {first_line(error)}", flush=True)
                continue
            print(name, flush=True)
            with precision("bf16"), torch.no_grad():
                compile_all(calls, candidates)
                for call in calls:
                    found = compared(call, candidates)
                    show(call.told, found, call.times)
                    result["us"].setdefault(name, {})[call.told] = found
                    gc.collect()
                    torch.cuda.empty_cache()
                    if asked.out:
                        write_json(asked.out, result, indent=1)


if __name__ == "__main__":
    main()
