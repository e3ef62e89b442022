"""What a run has of this machine: its processes, as torchrun tells each of them, its cores, its device.

Torch is imported late, since the command line asks before it knows that it needs it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fednorm.errors import ConfigError

if TYPE_CHECKING:
    import torch


def world_size() -> int:
    """Processes that torchrun started together; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Whether this process is the one that writes and prints."""
    return world_size() == 1 or int(os.environ.get("RANK", "0")) == 0


def refuse_ranks(what: str) -> None:
    """Refuse what one process does alone."""
    if world_size() > 1:
        raise ConfigError(f"{what} cannot be split over {world_size()} ranks; give torchrun one run at a time")


def usable_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def find_device(name: str) -> torch.device:
    """The torch device for `auto`, `cpu`, `cuda`, `cuda:1` or `mps`."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device '{name}' is not known; give auto, cpu, cuda, cuda:1 or mps") from None
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available.get(device.type, False) or (device.index or 0) >= max(1, torch.cuda.device_count()):
        raise ConfigError(f"device '{name}' is not available on this machine; give auto or cpu")
    return device


def refuse_other_than_cpu(device: torch.device) -> None:
    """Refuse worker processes for a device that they cannot share."""
    if device.type != "cpu":
        raise ConfigError(
            f"engine 'workers' trains on the CPU, but the device is {device}; give --device cpu, or --engine stacked"
        )


@functools.cache
def device_name(device: torch.device) -> str:
    """What a device is called by its maker."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@contextmanager
def precision(name: str) -> Iterator[None]:
    """Let float32 be rounded to tf32 inside products only where the precision allows it; given back afterwards.

    cuDNN also has convolutions whose gradients add up in whatever order threads come; a run that is played again must
    give the same bits, so those are left out. Our own kernels, which tf32 and bf16 use, always add up in one order.
    """
    import torch

    backends: Any = torch.backends  # whose switches are declared nowhere
    matmul, cudnn = backends.cuda.matmul, backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic
    matmul.allow_tf32 = cudnn.allow_tf32 = name != "fp32"
    cudnn.deterministic = True
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic = before


def current(device: torch.device) -> AbstractContextManager[object]:
    """In which a device is the one that kernels are launched on, streams are made on and graphs are captured on."""
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def narrow_type(precision: str) -> torch.dtype | None:
    """What activations are rounded to in a precision; None where they are as wide as the weights."""
    import torch

    return torch.bfloat16 if precision == "bf16" else None


@contextmanager
def threads(count: int) -> Iterator[None]:
    """This many threads for torch, given back afterwards."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Names of two settings of the C library."""
KEPT_BYTES, LARGEST_KEPT = 1 << 29, 32 << 20
"""Memory that a process of ours keeps for its next step, of tensors up to a size; the library takes no larger one."""


def keep_memory() -> None:
    """Let this process keep the memory of tensors it is done with, for the next step needs as much.

    The C library of Linux gives it back to the system at once where it lies at the end, and a system hands out pages
    one by one and wiped: with a small network that was about a quarter of a worker's CPU time. For processes that do
    nothing but train.
    """
    settle = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if settle is not None:  # other C libraries have no such settings
        settle(M_MMAP_THRESHOLD, LARGEST_KEPT)
        settle(M_TRIM_THRESHOLD, KEPT_BYTES)


def expect_large_tensors() -> None:
    """Let the C library keep some of the memory that tensors free, without setting anything in a user's process.

    It learns how much to keep from what a process frees: twice the largest block, and 64 MB at most. Before it has
    seen one, it gives back the activations of a step and gets them again, wiped, for the next: a small network had 20
    to 900 page faults a step, as it happened. A block that nobody writes to costs nothing and teaches it at once.
    """
    import torch

    torch.empty(LARGEST_KEPT - (1 << 20), dtype=torch.uint8, device="cpu")
