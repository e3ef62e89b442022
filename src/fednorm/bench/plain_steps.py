"""Steps in plain PyTorch: the loop over clients that everybody writes, and one centralized step on all their images.

Batches lie ready on the device, so gathering and augmentation cost them nothing; our engines do both in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from fednorm.bench.cases import CHANNELS, CLASSES, Case, labels_of

Form = Literal["eager", "graph", "compiled"]
FORMS: tuple[Form, ...] = ("eager", "graph", "compiled")
Step = Callable[[], object]


@contextmanager
def backends(precision: str, search: bool | None = True) -> Iterator[None]:
    """tf32 as a precision allows it, and cuDNN free to search for its fastest kernels; None leaves that as it is."""
    # Modules whose attributes are properties, which type checkers cannot see.
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    matmul.allow_tf32 = cudnn.allow_tf32 = precision != "fp32"
    cudnn.benchmark = cudnn.benchmark if search is None else search
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before[:2]
        cudnn.benchmark = cudnn.benchmark if search is None else before[2]


def training_step(net: Callable[..., torch.Tensor], model: nn.Module, batch: int, precision: str, case: Case) -> Step:
    """A step of SGD with momentum and weight decay on one batch."""
    device = next(model.parameters()).device
    x = torch.randn(batch, CHANNELS, case.pixels, case.pixels, device=device)
    y = torch.randint(0, CLASSES, (batch, *labels_of(case)), device=device)
    if next(model.parameters()).is_contiguous(memory_format=torch.channels_last):
        x = x.contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, weight_decay=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()

    return step


def client_loop(case: Case, clients: int, batch: int, precision: str, device: torch.device) -> Step:
    """One step of every client, one client after the other."""
    nets = [case.build().to(device).train() for _ in range(clients)]
    steps = [training_step(net, net, batch, precision, case) for net in nets]

    def play() -> None:
        with backends(precision):
            for step in steps:
                step()

    return play


def centralized(case: Case, images: int, form: Form, device: torch.device) -> Step:
    """One step on the union batch: bf16 autocast, channels-last; eager, as a CUDA graph, or compiled and as a graph."""
    plain = case.build().to(device).train()
    plain = plain.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    if form == "compiled":
        torch.compiler.reset()  # one shape at a time: nothing is compiled for shapes that vary
    net = torch.compile(plain, dynamic=False) if form == "compiled" else plain
    step = training_step(net, plain, images, "bf16", case)

    def play() -> None:
        with backends("bf16"):
            step()

    return captured(play) if form != "eager" else play


def captured(step: Step) -> Step:
    """A step as a replay of one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # compiles, allocates, and lets cuDNN choose
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    # The step is handed on with its graph, which reads the step's tensors for as long as it is replayed.
    return partial(_replay, graph, step)


def _replay(graph: torch.cuda.CUDAGraph, step: Step) -> None:
    graph.replay()
