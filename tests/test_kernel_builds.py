"""Every kernel is compiled for GPUs that are not here: `make test-kernels`."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pkgutil import iter_modules
from typing import TYPE_CHECKING

import pytest
import torch

from fednorm.bench.cases import read_cases
from fednorm.engines.stack.kernels import ops
from fednorm.engines.stack.kernels.element_ops import spread_into
from fednorm.engines.stack.program import compile_kernels

if TYPE_CHECKING:
    from torch.fx import GraphModule

pytestmark = [
    pytest.mark.skipif(not ops.HAS_TRITON or ops.INTERPRETED, reason="there is no Triton that compiles"),
    pytest.mark.timeout(900),
]
H200, CONSUMER, NEWEST = 90, 86, 120
ROOM = {H200: 227 * 1024, CONSUMER: 99 * 1024, NEWEST: 99 * 1024}
"""Bytes of shared memory that a program may have, by compute capability."""
MODELS = {
    "resnet20": {},
    "resnet20+gn+ws": {"train.optimizer": "adamw"},
    "mobilenet_v2": {},
    "simple_cnn": {},
    "lenet_cnn": {},
}


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def all_programs(wide: bool) -> list[GraphModule]:
    from kernel_builds import programs

    cases = zip(read_cases(",".join(MODELS), (2,)), MODELS.values(), strict=True)
    return [graph for case, settings in cases for graph in programs(case, 2, wide, **settings)]


def all_kernels() -> set[tuple[str, str]]:
    """All there are: the module of each, and what its function is called."""
    from fednorm.engines.stack import kernels
    from fednorm.engines.stack.kernels.launch import Kernel

    modules = [importlib.import_module(f"{kernels.__name__}.{each.name}") for each in iter_modules(kernels.__path__)]
    named = [(module.__name__, name, value) for module in modules for name, value in vars(module).items()]
    return {(module, name) for module, name, value in named if isinstance(value, Kernel)}


@pytest.mark.parametrize(("arch", "wide"), [(H200, False), (CONSUMER, False), (CONSUMER, True), (NEWEST, False)])
def test_kernels_compile_and_fit(arch: int, wide: bool) -> None:
    """All of them, for all that these models ask of them, in bfloat16 or in tf32."""
    from kernel_builds import building

    with tf32(wide), building(arch) as (kernels, failed):
        for graph in all_programs(wide):
            with compile_kernels(graph):
                pass
        for dtype in (torch.float32, torch.bfloat16):  # where a program puts what it returns
            spread_into(torch.empty(2, 32, dtype=dtype), torch.zeros(32, dtype=dtype).expand(2, -1))
    assert not failed
    # Linear layers are torch's own in float32, and only newer GPUs fetch boxes.
    left_out = {("fednorm.engines.stack.kernels.sgd", "_sgd_linear_kernel")} if wide else set()
    if arch == CONSUMER:
        left_out |= {(module, name) for module, name in all_kernels() if module.endswith(".boxes")}
    assert {(each.module, each.name) for each in kernels.values()} == all_kernels() - left_out
    assert all(each.binary for each in kernels.values())
    assert {each.name: each.shared for each in kernels.values() if each.shared > ROOM[arch]} == {}


@pytest.mark.parametrize("arch", [H200, NEWEST])
@pytest.mark.parametrize(
    ("channels", "size", "cuts"),
    [
        (64, 32, {(128, 64)}),
        (128, 16, {(128, 128)}),
        (256, 8, {(64, 128), (128, 256)}),
        (512, 4, {(64, 128), (128, 256)}),
    ],
)
def test_convolutions_that_fetch_boxes_fit(channels: int, size: int, cuts: set[tuple[int, int]], arch: int) -> None:
    """Those of a ResNet18, with what pixels and channels a program has of 5 and of 20 clients; nothing is spilled."""
    from fednorm.engines.stack.kernels.conv import Shape, run_conv, run_weight_grad
    from kernel_builds import Built, building

    def cut_of(built: Built) -> tuple[int, int]:
        number = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", built.options)}
        return number["IMAGES"] * number["ROWS"] * number["WIDTH"], number["BLOCK_OUT"]

    shape = Shape(1, 1, 1, 3, 3)
    with building(arch) as (kernels, failed):
        for clients in (5, 20):
            x = torch.empty(clients, 20, size, size, channels, dtype=torch.bfloat16)
            w = torch.empty(clients, channels, 3, 3, channels, dtype=torch.bfloat16)
            run_conv(x, w, (size, size), shape, moments=True)
            run_conv(x, w, (size, size), shape, backward=True, addend=x)
            run_weight_grad(x, x, shape)
    assert not failed
    assert {each.module.rpartition(".")[2] for each in kernels.values()} == {"boxes"}
    assert {cut_of(each) for each in kernels.values() if each.name == "_conv_kernel"} == cuts
    assert {each.options: each.shared for each in kernels.values() if each.shared > ROOM[arch]} == {}
    assert {each.options: each.usage() for each in kernels.values() if each.usage()[1]} == {}


@pytest.mark.parametrize(
    ("model", "at_most"), [("resnet20", 140), ("resnet18", 168), ("digit_cnn", 71), ("mobilenet_v2", 367)]
)
def test_a_step_is_few_launches(model: str, at_most: int) -> None:
    """Small models take as long as their launches: what a rewrite or an operator misses is seen here first."""
    from kernel_builds import building, launches, programs

    (case,) = read_cases(model, (5,))
    with tf32(False), building(H200):
        step = launches(programs(case, 5)[1])
    assert step["_weight_kernel"]
    assert step["_sgd_kernel"]
    assert 0.9 * at_most < step.total() <= at_most, step


def test_a_merge_is_few_launches() -> None:
    """Of rounds of one step it is a quarter of all."""
    from kernel_builds import building, launches, programs

    (case,) = read_cases("resnet20", (5,))
    with tf32(False), building(H200):
        merge = launches(programs(case, 5)[2])
    assert merge["_fold_kernel"] == 1
    assert 35 < merge.total() <= 42, merge


def test_a_kernel_that_does_not_compile_is_seen() -> None:
    """A row of numbers whose length is no power of 2 is an error of the compiler's."""
    from fednorm.engines.stack.kernels.elements import _fold_kernel
    from kernel_builds import building

    stack, weights, out = torch.empty(1, 1, 8), torch.empty(1, 1), torch.empty(1, 8, dtype=torch.float64)
    with building(H200) as (kernels, failed):
        with pytest.raises(Exception, match="power of 2"):
            _fold_kernel[(1, 1)](stack, weights, out, 8, 8, 8, CLIENTS=1, BLOCK=100, num_warps=4)
        assert failed
        _fold_kernel[(1, 1)](stack, weights, out, 8, 8, 8, CLIENTS=1, BLOCK=128, num_warps=4)
    assert [each.name for each in kernels.values()] == ["_fold_kernel"]
